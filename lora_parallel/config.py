"""Define `ParallelConfig`, which holds the options of `parallelize` and checks them before any model is touched.

The front ends, and other libraries, name the same things differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from typing import Any, ClassVar, Literal, TypeVar

import torch

from lora_parallel.sizes import check_schedule

T = TypeVar("T")

# groups of names for the same thing in the engine's config, the front ends and other libraries
_SAME = (
    ("tp", "tensor_parallel_size", "tp_size", "tensor_parallel", "tensor_model_parallel_size", "tp_degree"),
    ("cp", "context_parallel_size", "cp_size", "context_parallel", "context_parallel_degree", "cp_degree"),
    ("cp_method", "context_parallel_method", "cp_comm_strategy"),
    ("pp", "pipeline_parallel_size", "pp_size", "pipeline_parallel", "pipeline_model_parallel_size", "pp_degree"),
    ("pp_microbatches", "pipeline_microbatches", "microbatches", "num_microbatches", "pp_num_microbatches"),
    ("pp_schedule", "pipeline_schedule", "schedule", "pipeline_parallel_schedule"),
    ("pp_stages_per_rank", "pipeline_stages_per_rank", "virtual_pipeline_parallel_size", "num_virtual_stages"),
    ("pp_split", "pipeline_split", "pipeline_parallel_split_points", "split_points"),
    ("dp_shard", "data_parallel_size", "dp_shard_size", "dp_size", "dp", "data_parallel", "fsdp", "fsdp_size"),
    ("dp_replicate", "replicate_size", "dp_replicate_size", "replicate", "replicas", "hsdp_size"),
    ("lora_config", "peft_config", "lora", "adapter_config"),
    ("activation_checkpointing", "gradient_checkpointing", "use_activation_checkpointing"),
    ("block_classes", "transformer_cls_names_to_wrap", "auto_wrap_policy", "wrap_policy"),
    ("timeout_seconds", "timeout"),
)


def suggest_arguments(kind: type[T]) -> type[T]:
    """Make a class suggest the argument that was meant when it is given one that it does not have.

    The signature of the class stays as it is. Arguments that subclasses add are suggested too.
    """
    bare_init: Callable[..., None] = kind.__dict__["__init__"]
    known = signature(bare_init).parameters

    @wraps(bare_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        for name, value in kwargs.items():
            if name not in known:
                taken = [argument for argument in _arguments(type(self), kind) if argument not in kwargs]
                raise TypeError(
                    f"{type(self).__name__} has no argument {name}={value!r}: {_meant(name, taken)}It has "
                    f"{', '.join(_arguments(type(self), kind))}."
                )
        bare_init(self, *args, **kwargs)

    kind.__init__ = init  # type: ignore[method-assign]
    return kind


def check_positive(name: str, value: object, also: str | None = None) -> None:
    """Check that an argument is a positive int.

    Args:
        name: The name of the argument.
        value: Its value.
        also: A word that it may be too.

    Raises:
        TypeError: It is no int.
        ValueError: It is less than 1.
    """
    if also is not None and value == also:
        return
    words = f"{name}={value!r}: give a positive int{f' or {also}' if also else ''}."
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(words)
    if value < 1:
        raise ValueError(words)


def _arguments(kind: type, last: type) -> list[str]:
    """List the arguments of `kind` that may be given by name, with those of its base classes up to `last`."""
    names: dict[str, None] = {}
    for base in kind.__mro__[: kind.__mro__.index(last) + 1]:
        if "__init__" in base.__dict__:
            parameters = list(signature(base.__dict__["__init__"]).parameters.values())[1:]
            names |= {p.name: None for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return list(names)


def _meant(name: str, taken: Iterable[str]) -> str:
    synonyms = [synonym for names in _SAME if name in names for synonym in names]
    near = [synonym for synonym in synonyms if synonym in taken] or (
        [] if synonyms else get_close_matches(name, list(taken), 1)
    )
    return f"did you mean {near[0]}? " if near else ""


@suggest_arguments
@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Hold the sizes of the mesh axes and the options of `parallelize`.

    Raises:
        TypeError: A field has the wrong type.
        ValueError: A field has a value that cannot work, or that is not supported yet.
    """

    tp: int = 1
    """Number of ranks along the `tp` axis; each holds a slice of every planned layer and sees the same batch."""

    dp_shard: int | Literal["auto"] = "auto"
    """Number of ranks along the `dp_shard` axis, over which FSDP2 shards. "auto": as many as the other axes leave."""

    dp_replicate: int = 1
    """Number of ranks along the `dp_replicate` axis: copies of the sharded model (HSDP if dp_shard > 1)."""

    cp: int = 1
    """Number of ranks along the `cp` axis; each computes a chunk of the tokens of one batch, which all of them see."""

    cp_method: Literal["ulysses", "all_gather"] = "ulysses"
    """Method by which attention gets all tokens under cp.

    "ulysses": an all-to-all gives each rank all tokens of a share of the heads. "all_gather": each rank gathers the
    keys and values of all tokens.
    """

    pp: int = 1
    """Number of ranks along the `pp` axis; each holds some of the model's blocks, and hands activations on to the next.

    The fields that begin with `pp_` have no effect where this is 1.
    """

    pp_microbatches: int = 1
    """Number of micro-batches that the rows of a batch are divided into."""

    pp_schedule: Literal["1f1b", "gpipe", "interleaved"] = "1f1b"
    """Order in which a rank computes forwards and backwards of micro-batches (see `lora_parallel.pp.schedules`)."""

    pp_stages_per_rank: int = 1
    """Number of stages that each pp rank holds: 1, or more with pp_schedule="interleaved"."""

    pp_split: Literal["auto"] | Sequence[str] = "auto"
    """Names of the blocks that begin a stage, from the second stage on: ["model.layers.16"] for two stages.

    "auto" balances the bytes and the floating-point operations of the stages, embeddings and head included.
    """

    tp_plan: Literal["auto"] | Mapping[str, str] = "auto"
    """Plan of the layers' styles. "auto" takes the model's own plan.

    A mapping {glob: style} is laid over the model's own plan; each glob must match.
    """

    param_dtype: torch.dtype | None = None
    """Dtype to compute in (FSDP2's `MixedPrecisionPolicy`); parameters keep their own. None: the parameters' dtype."""

    reduce_dtype: torch.dtype | None = torch.float32
    """Smallest dtype in which gradients are reduced over dp; wider gradients are never narrowed. None: no minimum."""

    block_classes: Literal["auto"] | Sequence[str] = "auto"
    """Class names of the modules that become one FSDP unit each. "auto": the model's `_no_split_modules`."""

    reshard_after_forward: bool = True
    """True frees a unit's gathered weights after its forward and gathers them again in backward."""

    prefetch_blocks: int = 0
    """Number of blocks whose weights are gathered ahead of the block that runs, in forward and in backward.

    0 leaves it to FSDP2, which gathers the next block's as the host comes to that block (forward), or one ahead
    (backward). 1 serves where the host is slower than the GPU; more hide slower networks. Each takes a block's memory.
    It has no effect with `shard_base=False`, where blocks have nothing to gather.
    """

    shard_base: bool = True
    """False keeps the base whole, or this tp rank's slice of it, on every data-parallel rank.

    FSDP2 then shards what trains alone, as one unit: a forward gathers the adapters once, and no base weight.
    """

    fused: bool = True
    """True computes a LoRA layer and its base in one function (`lora_parallel.adapters.fused_lora`). False leaves every
    layer PEFT's forward: for derivatives of gradients (`create_graph=True`), or to compare.
    """

    activation_checkpointing: bool = False
    """True recomputes each block's activations in backward."""

    require_adapters: bool = True
    """True refuses a model without adapters, and one whose base trains. False leaves `requires_grad` as it is."""

    seed: int = 0
    """Seed of the adapters that `parallelize` injects and of LoRA dropout."""

    timeout_seconds: int = 1800
    """Seconds after which a collective that a peer has not joined is an error."""

    sequence_parallel: bool = False
    """True gives each tp rank a chunk of the tokens between the layers that tp splits.

    This takes less memory and the same traffic.
    """

    loss_parallel: bool = False
    """True leaves the logits that a language model's head computes in training in slices, one on each tp rank.

    The cross entropy is computed from the slices, in chunks of the tokens. What else reads the logits gathers them.
    """

    cpu_offload: bool = False
    """True keeps what FSDP2 shards in the CPU's memory (`CPUOffloadPolicy`): the frozen base, the adapters, their
    gradients and their optimizer's state. A unit's shard is copied to the accelerator as the unit is gathered.

    Refused until it has run over NCCL.
    """

    compile: bool | Mapping[str, Any] = False
    """True compiles each block with `torch.compile`. A mapping gives arguments of it: {"fullgraph": True}."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        "cpu_offload": "cpu_offload=True (fsdp_offload_params: true in an Accelerate file) is refused, because it has "
        "not run over NCCL yet: leave it False.",
    }
    """Fields that may not be True yet, each with the error message.

    An option that is written but has not run on the hardware that it is for stands here. A run that is to prove it on
    that hardware (`benchmarks/gpu`) uses a subclass without the entry.
    """

    def __post_init__(self) -> None:
        for name in ("tp", "cp", "dp_replicate", "timeout_seconds", "pp", "pp_microbatches", "pp_stages_per_rank"):
            check_positive(name, getattr(self, name))
        check_positive("dp_shard", self.dp_shard, also="auto")
        if self.prefetch_blocks != 0:
            check_positive("prefetch_blocks", self.prefetch_blocks, also="0")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise TypeError(f"seed={self.seed!r}: give an int.")
        flags = ("reshard_after_forward", "activation_checkpointing", "require_adapters", "sequence_parallel")
        for name in (*flags, "cpu_offload", "loss_parallel", "shard_base", "fused"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}={getattr(self, name)!r}: give True or False.")
        if self.cp_method not in ("ulysses", "all_gather"):
            raise ValueError(f'cp_method={self.cp_method!r}: give "ulysses" or "all_gather".')
        if isinstance(self.tp_plan, str):
            if self.tp_plan != "auto":
                raise ValueError(f'tp_plan={self.tp_plan!r}: give "auto" or a mapping {{glob: style}}.')
        elif not isinstance(self.tp_plan, Mapping):
            raise TypeError(f'tp_plan is a {type(self.tp_plan).__name__}: give "auto" or a mapping {{glob: style}}.')
        elif not all(isinstance(glob, str) for glob in self.tp_plan):
            raise TypeError(f"tp_plan={self.tp_plan!r}: its keys are globs of module names, as str.")
        if not isinstance(self.block_classes, (str, list, tuple)):
            raise TypeError(f"block_classes={self.block_classes!r}: give a list of class names.")
        if isinstance(self.block_classes, str) and self.block_classes != "auto":
            raise ValueError(f'block_classes={self.block_classes!r}: give "auto" or a list of class names.')
        for name in ("param_dtype", "reduce_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise TypeError(f"{name}={dtype!r}: give a floating-point torch.dtype or None.")
        if self.param_dtype is torch.float16:
            raise ValueError(
                "param_dtype=torch.float16 needs loss scaling, which sharded training does not have here: "
                "use torch.bfloat16."
            )
        for name, message in self.REFUSED.items():
            if getattr(self, name):
                raise ValueError(message)
        self._check_pipeline()
        self._check_compile()

    def _check_pipeline(self) -> None:
        check_schedule(self.pp, self.pp_schedule, self.pp_stages_per_rank)
        if isinstance(self.pp_split, str):
            if self.pp_split != "auto":
                raise ValueError(f'pp_split={self.pp_split!r}: give "auto" or a list of names of blocks.')
        elif not isinstance(self.pp_split, (list, tuple)) or not all(isinstance(name, str) for name in self.pp_split):
            raise TypeError(f'pp_split={self.pp_split!r}: give "auto" or a list of names of blocks.')
        elif self.pp > 1 and len(self.pp_split) != self.pp * self.pp_stages_per_rank - 1:
            raise ValueError(
                f"pp_split={list(self.pp_split)} names {len(self.pp_split)} blocks that begin a stage; pp={self.pp} "
                f"with pp_stages_per_rank={self.pp_stages_per_rank} makes {self.pp * self.pp_stages_per_rank} stages, "
                "of which all but the first are named."
            )

    def _check_compile(self) -> None:
        if isinstance(self.compile, bool):
            return
        if not isinstance(self.compile, Mapping):
            raise TypeError(f"compile={self.compile!r}: give True, False or a mapping of torch.compile's arguments.")
        known = [name for name in signature(torch.compile).parameters if name not in ("model", "disable")]
        unknown = [name for name in self.compile if name not in known]
        if unknown:
            raise ValueError(
                f"compile={dict(self.compile)!r}: torch.compile has no argument "
                f"{', '.join(map(repr, unknown))}; it has {', '.join(known)}."
            )
        try:
            torch.compile(lambda: None, **self.compile)  # which checks its arguments, and compiles nothing yet
        except Exception as error:  # of many types, those of the backend too
            raise ValueError(f"compile={dict(self.compile)!r}: torch.compile refuses it: {error}") from error
        options = self.compile.get("options") or {}
        if (
            self.compile.get("mode") in ("reduce-overhead", "max-autotune")
            or self.compile.get("backend") == "cudagraphs"
            or options.get("triton.cudagraphs")
        ):
            raise ValueError(
                f"compile={dict(self.compile)!r} asks for CUDA graphs, which replay a step on the memory of the first, "
                "and have not run with weights that FSDP2 gathers into new memory in each: use compile=True or "
                '{"mode": "max-autotune-no-cudagraphs"}.'
            )

    @property
    def compile_arguments(self) -> Mapping[str, Any] | None:
        """Return the arguments that blocks are compiled with, or None if they are not compiled."""
        if isinstance(self.compile, Mapping):
            return self.compile
        return {} if self.compile else None
