"""What the tensor parallel units of a model share: the tp axis, partial gradients, the input last fed to slices."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard

from lora_parallel.adapters import adapter_parameters
from lora_parallel.collectives import chunk_bounds, copy_to_tp, gather_tokens
from lora_parallel.dropout import ForwardCount
from lora_parallel.grads import PartialGradients
from lora_parallel.layers import shared_parameters
from lora_parallel.selection import Selection

__all__ = ["TPContext", "Tokens"]


class Tokens:
    """How many tokens there are where each rank has a chunk of them (sequence parallelism), which a chunk does not
    tell: in the forward that is being computed, or recomputed.
    """

    def __init__(self, forwards: ForwardCount) -> None:
        self._forwards = forwards
        self._counts: dict[int, int] = {}

    @property
    def count(self) -> int:
        """The number now."""
        return self._counts[self._forwards.current if torch.is_grad_enabled() else -1]

    @count.setter
    def count(self, number: int) -> None:
        self._counts[self._forwards.current if torch.is_grad_enabled() else -1] = number
        self._counts.pop(self._forwards.current - _FORWARDS_KEPT, None)


_FORWARDS_KEPT = 1024
"""How many forwards may wait for their backward."""


class TPContext:
    """What all units of one model share: the tp axis, the partial gradients, and the input last fed to slices."""

    def __init__(self, mesh: DeviceMesh, gradients: PartialGradients, model: nn.Module, forwards: ForwardCount) -> None:
        self.mesh = mesh["tp"]
        self.group = self.mesh.get_group()
        self.rank = self.mesh.get_local_rank()
        self.gradients = gradients
        self.tokens = Tokens(forwards)
        self.stored_whole = {p for p in model.parameters() if p.requires_grad} | {*adapter_parameters(model).values()}
        """What is saved: never rearranged, whatever a rank computes with."""

        self._shared: dict[nn.Parameter, nn.Parameter | None] = dict.fromkeys(shared_parameters(model))
        self._last: tuple[Tensor, tuple[object, ...], Tensor] | None = None

    def place(
        self, parameter: nn.Parameter, placement: Placement, selected: tuple[Selection, int] | None = None
    ) -> nn.Parameter:
        """`parameter` as a DTensor over tp that holds this rank's slice and nothing of the rest.

        With a selection and its dim, the slices are of the rows that it arranges. A parameter that two layers share
        (tied head and embedding) stays shared.
        """
        placed = self._shared.get(parameter)
        if placed is not None:
            return placed
        full = parameter.detach()
        if selected is not None:
            selection, dim = selected
            full = selection.arranged(full, dim)
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
        """How many of `size` elements this rank has."""
        start, end = chunk_bounds(size, self.mesh.size(), self.rank)
        return end - start

    def forget_originals(self) -> None:
        """Let go of the full parameters."""
        self._shared.clear()
        self.stored_whole.clear()

    def copy(self, x: Tensor, where: str) -> Tensor:
        """`x` fed to slices. Layers called in a row with the same tensor share one reduction of its gradient.

        q, k and v, or gate and up, are such layers. Identity decides, so nothing is assumed of the model: a layer that
        is fed anything else gets a reduction of its own.
        """
        return self._shared_by_layers(x, lambda: copy_to_tp(x, self.group, where))

    def _shared_by_layers(self, x: Tensor, feed: Callable[[], Tensor]) -> Tensor:
        version = -1 if x.is_inference() else x._version
        key = (version, torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        if self._last is not None and self._last[0] is x and self._last[1] == key:
            return self._last[2]
        fed = feed()
        self._last = (x, key, fed)
        return fed

    def all_tokens(self, x: Tensor, where: str) -> Tensor:
        """`x`, a chunk of the tokens, fed to slices as all of them. Layers called in a row share one gather."""
        return self._shared_by_layers(x, lambda: gather_tokens(x, self.tokens.count, self.group, where))

    def forget_input(self) -> None:
        """Let go of the last input, once the model's forward has ended."""
        self._last = None
