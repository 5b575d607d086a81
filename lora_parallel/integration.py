"""The names of the engine that front ends use besides the public ones of `lora_parallel`.

A front end imports `lora_parallel` and this module, and no other of the engine's: what moves inside the engine is no
matter to it then. These names may change between minor releases.
"""

from __future__ import annotations

from lora_parallel.adapters.base_fingerprint import base_fingerprints, check_base
from lora_parallel.adapters.injection import has_adapters
from lora_parallel.adapters.inspection import adapter_parameters, check_config, check_unmerged, peft_configs
from lora_parallel.checkpoint.files import of_another, read_meta
from lora_parallel.checkpoint.reader import (
    Contents,
    is_checkpoint,
    load_models,
    load_optimizers,
    open_checkpoint_folder,
    read_checkpoint,
    resume_counting,
    state_dict_of,
)
from lora_parallel.checkpoint.states import TrainState, restore_random_state
from lora_parallel.checkpoint.writer import may_be_replaced, write_checkpoint
from lora_parallel.config import check_positive, suggest_arguments
from lora_parallel.distributed.dtensors import gather_on_rank_zero, local, reshard
from lora_parallel.distributed.gradients import clip_grad_value_
from lora_parallel.distributed.meetings import collective_call
from lora_parallel.distributed.mesh import (
    dp_rank,
    dp_size,
    merged_over_stages,
    mesh_sizes,
    over_stages,
    same_batch_groups,
)
from lora_parallel.distributed.rank_checks import agreed, begin_gather, gather_numbers, gather_objects
from lora_parallel.distributed.torch_private import fake_process_group, group_named
from lora_parallel.export.save_pretrained import save_on_rank_zero, write_pretrained
from lora_parallel.lazy.materialize import read_weights
from lora_parallel.lazy.tracking import check_checkpoints, has_deferred
from lora_parallel.loading.meta_init import adopt_rank_zero, defer_from_pretrained, tensors_of
from lora_parallel.metrics import MeshMeter
from lora_parallel.replaced import replaced
from lora_parallel.runtime.compiled_blocks import tell_unwrapped, unwrap_compiled
from lora_parallel.runtime.description import (
    SetUpIsPossible,
    describe,
    description_to_print,
    end_after_set_up,
    is_checked,
)
from lora_parallel.runtime.guards import check_optimized
from lora_parallel.runtime.optimizer_params import HeldByName, check_not_stale, describe_optimizer
from lora_parallel.runtime.refusals import explained
from lora_parallel.sizes import axes_text, mesh_text, rank_lines
from lora_parallel.state import parallelized, state_of
from lora_parallel.storage import Scratch, check_free, check_loadable, local_path, remove_folder, sweep, without_numpy

__all__ = [
    "Contents",
    "HeldByName",
    "MeshMeter",
    "Scratch",
    "SetUpIsPossible",
    "TrainState",
    "adapter_parameters",
    "adopt_rank_zero",
    "agreed",
    "axes_text",
    "base_fingerprints",
    "begin_gather",
    "check_base",
    "check_checkpoints",
    "check_config",
    "check_free",
    "check_loadable",
    "check_not_stale",
    "check_optimized",
    "check_positive",
    "check_unmerged",
    "clip_grad_value_",
    "collective_call",
    "defer_from_pretrained",
    "describe",
    "describe_optimizer",
    "description_to_print",
    "dp_rank",
    "dp_size",
    "end_after_set_up",
    "explained",
    "fake_process_group",
    "gather_numbers",
    "gather_objects",
    "gather_on_rank_zero",
    "group_named",
    "has_adapters",
    "has_deferred",
    "is_checked",
    "is_checkpoint",
    "load_models",
    "load_optimizers",
    "local",
    "local_path",
    "may_be_replaced",
    "merged_over_stages",
    "mesh_sizes",
    "mesh_text",
    "of_another",
    "open_checkpoint_folder",
    "over_stages",
    "parallelized",
    "peft_configs",
    "rank_lines",
    "read_checkpoint",
    "read_meta",
    "read_weights",
    "remove_folder",
    "replaced",
    "reshard",
    "restore_random_state",
    "resume_counting",
    "same_batch_groups",
    "save_on_rank_zero",
    "state_dict_of",
    "state_of",
    "suggest_arguments",
    "sweep",
    "tell_unwrapped",
    "tensors_of",
    "unwrap_compiled",
    "without_numpy",
    "write_checkpoint",
    "write_pretrained",
]
