"""Why cells are as they are: found by reading the library's source, and by a run without this harness."""

from __future__ import annotations

import re
from dataclasses import dataclass

from benchmarks.peer.rows import Cell


@dataclass(frozen=True)
class Note:
    """What is said of some cells."""

    text: str
    said: str = ".*"
    """A regular expression for the cell's text."""

    row: str = ".*"
    peer: str = ".*"
    mesh: str = ".*"

    def fits(self, row: str, peer: str, mesh: str, cell: Cell) -> bool:
        """Return True if it is of this cell."""
        asked = ((self.row, row), (self.peer, peer), (self.mesh, mesh))
        return all(re.fullmatch(pattern, text) for pattern, text in asked) and bool(re.search(self.said, cell.text()))


NOTES = [
    Note(
        "With a mesh of both axes PEFT takes a weight's slice along both for its slice along tp "
        "(`peft/tuners/tuners_utils.py:186`: `weight.to_local().shape`, of a weight that FSDP2 has "
        "sharded too), so that factors have half of the features that they need. A script of ten lines "
        "with `get_peft_model` and a forward meets it too.",
        said="shape|size of tensor",
        peer="transformers",
        mesh="2x2",
    ),
    Note(
        "`RuntimeError: shape '[96, 12]' is invalid for input of size 2304`. PEFT gives `lora_A` of a "
        "rowwise layer the rank's slice of the input features (`peft/tuners/tuners_utils.py:186`), and "
        "transformers' rowwise style takes `module.in_features` for all of them "
        "(`transformers/distributed/tensor_parallel.py:261`), so that it halves them again. Any adapter "
        "on `o_proj` or `down_proj` meets it, in a script of ten lines with `get_peft_model` and a "
        "forward too.",
        said="is invalid for input",
        peer="transformers|accelerate",
        mesh="1x2",
    ),
    Note(
        "`RuntimeError: The parallel mesh requires 2 processes, but world_size is 4.` Accelerate's "
        "example gives `from_pretrained` its mesh, and transformers 5.23 makes one of its own, of all "
        "processes (`transformers/modeling_utils.py:4237`). With a `DistributedConfig` of both sizes it "
        "is transformers that shards: the column before.",
        said="parallel mesh requires",
        peer="accelerate",
    ),
    Note(
        "`ValueError: Resuming is not supported for models sharded at load time (DistributedConfig)` "
        "(`transformers/trainer.py:638`).",
        said="Resuming is not supported",
    ),
    Note(
        "`torch.nn.utils.clip_grad_norm_`, which Lightning calls "
        "(`lightning/pytorch/plugins/precision/precision.py:166`), takes no plain tensors beside "
        "DTensors, and no DTensors of two meshes: the factor of an adapter that stays whole has another "
        "mesh, or none.",
        row="two steps",
        peer="lightning",
    ),
    Note(
        "`Trainer` seeds every process alike (`transformers/trainer.py:419`), so that the rows of all "
        "data-parallel ranks lose the same features.",
        row="dropout",
        peer="transformers",
        said="dp same",
    ),
    Note(
        "A process has a random state of its own, and ranks along tp drop other features of the input "
        "that they share: the factor that each holds whole has another gradient on each. With the same "
        "seed on all ranks (`seed_everything`) it is the data-parallel ranks that drop the same.",
        row="dropout",
        peer="lightning",
        said="tp differ",
    ),
    Note(
        "`AttributeError: 'ParamWrapper' object has no attribute 'weight'`. Two stacks of one module have "
        "adapters, which PEFT nests, and its hooks for tensor parallelism ask the inner one for a weight "
        "(`peft/tuners/lora/model.py:144`).",
        said="ParamWrapper",
    ),
    Note(
        "`RuntimeError: aten.add.Tensor got mixed torch.Tensor and DTensor`. PEFT's DoRA adds the product "
        "of the factors to the base's weight (`peft/tuners/lora/dora.py:89`), and only one of the two is "
        "a DTensor: in transformers as the adapter is made, in Lightning in the forward.",
        row="DoRA",
        said="mixed",
    ),
    Note(
        "`AssertionError: FSDP does not support deepcopy`, or at 1x2 `RuntimeError: Attempted to call "
        "copy_() on an invalid python storage`. PEFT copies the module that is to be saved, whose "
        "parameters transformers has made DTensors by then.",
        row="modules_to_save",
        peer="transformers|accelerate",
        said="deepcopy|copy_",
    ),
]
