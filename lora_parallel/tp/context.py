"""Hold what the tensor parallel layers of a model share: the tp axis, the gradients, numbers of tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard

from lora_parallel.adapters.inspection import adapter_parameters
from lora_parallel.distributed.collectives import chunk_bounds, copy_to_tp
from lora_parallel.distributed.gradients import Gradients
from lora_parallel.distributed.token_chunks import TokenChunks
from lora_parallel.distributed.torch_private import in_backward
from lora_parallel.layers.layer_parameters import innermost, shared_parameters
from lora_parallel.layers.styles import RowPartition
from lora_parallel.state import ForwardCount


class Tokens:
    """Hold the number of tokens of each forward until its backward: a rank's chunk does not tell it."""

    def __init__(self, forwards: ForwardCount) -> None:
        self._forwards = forwards
        self._counts: dict[int, int] = {}
        self._several: set[int] = set()  # Forwards in which there were several numbers
        # Number of all tokens in a graph, which is given it: a number that it looked up would be a constant of it.
        self.in_graph = 0

    def known(self) -> int:
        """Return the number of all tokens in the forward that is being computed or recomputed; 0 if nobody set it."""
        return self._counts.get(self._key, 0)

    @property
    def _key(self) -> int:
        return self._forwards.current if torch.is_grad_enabled() else -1

    @property
    def count(self) -> int:
        """Return the number of all tokens in the forward that is being computed or recomputed."""
        if torch.compiler.is_compiling():
            return self.in_graph
        key = self._key
        if key not in self._counts:
            raise ValueError(
                "the number of tokens of this forward is not known, as if activations were recomputed with "
                "use_reentrant=True: use gradient_checkpointing_kwargs={'use_reentrant': False}, or "
                "activation_checkpointing=True."
            )
        if key in self._several and in_backward():
            raise ValueError(
                "one forward ran its blocks on rows of several lengths, and which of them is recomputed is not known: "
                "call the parallelized model once for each length, or recompute nothing."
            )
        return self._counts[key]

    @count.setter
    def count(self, number: int) -> None:
        key = self._key
        if self._counts.get(key, number) != number and not in_backward():
            self._several.add(key)
        self._counts[key] = number
        if key >= 0:
            self._counts.pop(-1, None)  # a reentrant checkpoint would take it for that of its forward
        self._counts.pop(self._forwards.current - _FORWARDS_KEPT, None)
        self._several.discard(self._forwards.current - _FORWARDS_KEPT)


_FORWARDS_KEPT = 1024  # Number of forwards whose number of tokens is kept for their backward


class TPContext:
    """Hold the tp axis, the gradients and the last input, which all tensor parallel layers of a model share."""

    def __init__(self, mesh: DeviceMesh, gradients: Gradients, model: nn.Module, forwards: ForwardCount) -> None:
        self.mesh = mesh["tp"]
        self.group = self.mesh.get_group()
        self.rank = self.mesh.get_local_rank()
        self.gradients = gradients
        self.tokens = Tokens(forwards)
        self._config = getattr(innermost(model), "config", None)
        self.chunks = TokenChunks(self.mesh.size(), self.rank, self.group)
        # Parameters that train or belong to an adapter, until they are placed. They are saved, so a row partition never
        # rearranges them, whatever rows a rank computes with.
        trained = {p for p in model.parameters() if p.requires_grad}
        self.keeps_row_order = trained | {*adapter_parameters(model).values()}
        self._shared: dict[nn.Parameter, nn.Parameter | None] = dict.fromkeys(shared_parameters(model))
        self._last: tuple[Tensor, tuple[object, ...], Tensor] | None = None

    def place(
        self, parameter: nn.Parameter, placement: Placement, selected: tuple[RowPartition, int] | None = None
    ) -> nn.Parameter:
        """Return `parameter` as a DTensor over tp with this rank's slice, and no memory of the rest; ties stay ties."""
        # `selected`: a row partition, and the dim along which it rearranges the rows before they are cut.
        placed = self._shared.get(parameter)
        if placed is not None:
            return placed
        full = parameter.detach()
        if selected is not None:
            partition, dim = selected
            full = partition.arranged(full, dim)
        if isinstance(placement, Shard):
            start, end = chunk_bounds(full.shape[placement.dim], self.mesh.size(), self.rank)
            local = full.narrow(placement.dim, start, end - start).clone(memory_format=torch.contiguous_format)
        else:
            local = full.contiguous()
        sharded = DTensor.from_local(
            local if local.is_meta else local.to(self.mesh.device_type),
            self.mesh,
            [placement],
            run_check=False,
            shape=full.shape,
            stride=torch.empty(full.shape, device="meta").stride(),
        )
        placed = nn.Parameter(sharded, requires_grad=parameter.requires_grad)
        if parameter in self._shared:
            self._shared[parameter] = placed
        return placed

    def is_placed(self, parameter: nn.Parameter) -> bool:
        """Return True if another layer shares `parameter` and was placed already: the tie must not be cut."""
        return self._shared.get(parameter) is not None

    def slice_of(self, size: int) -> int:
        """Return the number of elements in this rank's chunk of `size` elements."""
        start, end = chunk_bounds(size, self.mesh.size(), self.rank)
        return end - start

    def forget_originals(self) -> None:
        """Drop the references to the full parameters, so that their memory is freed."""
        self._shared.clear()
        self.keeps_row_order.clear()

    def copy(self, x: Tensor, where: str) -> Tensor:
        """Return `x` as the input of layers that compute slices: in backward its gradient is summed over tp."""
        # Layers that are called in a row with the same tensor object (q, k and v; gate and up) share one reduction.
        key = self._state_of(x)
        if self._last is None or self._last[0] is not x or self._last[1] != key:
            self._last = x, key, copy_to_tp(x, self.group, where)
        return self._last[2]

    def all_tokens(self, x: Tensor, where: str) -> Tensor:
        """Gather each rank's chunk [rows, tokens, ...] to all tokens; layers that are called in a row share it."""
        key = self._state_of(x)
        if self._last is None or self._last[0] is not x or self._last[1] != key:
            self._last = x, key, self.chunks.gather(x, self.tokens.count, where)
        return self._last[2]

    @staticmethod
    def _state_of(x: Tensor) -> tuple[object, ...]:
        """Return what must be as it was for layers to share an input: the modes, and the version of its values."""
        if torch.compiler.is_compiling():  # torch.compile cannot trace the version, nor inference tensors
            return (torch.is_grad_enabled(),)
        version = -1 if x.is_inference() else x._version
        return torch.is_grad_enabled(), version, torch.is_inference_mode_enabled()

    def begin_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a forward that is asked for attention weights, of which this rank has those of its own heads."""
        asked = kwargs.get("output_attentions")
        if asked if asked is not None else getattr(self._config, "output_attentions", False):
            raise ValueError(
                "output_attentions=True: under tensor parallelism each rank has the attention of its own heads only, "
                "and would return that. Leave it False, or use tp=1."
            )

    def end_forward(self) -> None:
        self.forget_input()

    def end_backward(self) -> None:
        self.forget_input()  # that of a recomputed block, whose graph it would keep alive

    def forget_input(self) -> None:
        """Drop the reference to the last input, after the model's forward."""
        self._last = None
