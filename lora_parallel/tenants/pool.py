"""`TenantPool`: the life of a tenant, from `add` to `remove`."""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lora_parallel.agreement import agreed, gather_numbers
from lora_parallel.atomic import local_path
from lora_parallel.deferred import without_values
from lora_parallel.dropout import TopologyInvariantDropout
from lora_parallel.gather import local
from lora_parallel.identity import base_fingerprints
from lora_parallel.inject import seeded
from lora_parallel.mesh import dp_rank, dp_size
from lora_parallel.names import clean_names
from lora_parallel.peft_hooks import DRAWN, observe_layers
from lora_parallel.state import ParallelState, state_of
from lora_parallel.tenants.budget import wanted
from lora_parallel.tenants.factor import Factor
from lora_parallel.tenants.layer import TenantLayer
from lora_parallel.tenants.reduction import finish
from lora_parallel.tenants.route import Route
from lora_parallel.tenants.shards import gather
from lora_parallel.tenants.state import load_tenant, save_tenant
from lora_parallel.upstream import in_backward

__all__ = ["TenantPool"]

Optimizers = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass
class _Tenant:
    name: str
    config: LoraConfig
    seed: int
    """What its dropout is drawn from."""

    steps: int = 0
    wants: int = 0
    """The bytes that it takes of the pool's budget."""

    layers: list[TenantLayer] = field(default_factory=list)
    optimizer: torch.optim.Optimizer | None = None
    finished: list[Tensor | None] = field(default_factory=list)
    """Of each factor: the gradient that has been summed over all ranks since the last step."""

    forwards: int = 0
    """How many training forwards it has taken part in; its dropout goes by that."""

    @property
    def factors(self) -> list[Factor]:
        """In the order of the layers."""
        return [factor for layer in self.layers for factor in layer.factors[self.name]]


class TenantPool:
    """Several LoRA fine-tunes that share one frozen base. Every method but the queries is collective.

    Args:
        model: What `parallelize` returned with `ParallelConfig(require_adapters=False)`, without adapters. The pool
            freezes it.
        shard: Share adapters and optimizer states out over the dp_shard axis. A step gathers the adapters that it
            needs, in one message; without it every data-parallel rank has them, and none is needed.
        budget: The bytes that all tenants may take on a rank: adapters, gradients and optimizer states.

    Raises:
        ValueError: The model was not parallelized, or has adapters; or `budget` is not positive.
    """

    def __init__(self, model: nn.Module, shard: bool = False, budget: int | None = None) -> None:
        state = state_of(model)
        if state is None:
            raise ValueError(f"this {type(model).__name__} was not parallelized; pass what parallelize returned.")
        if state.bare is None:
            raise ValueError(
                "the model has adapters of its own, or was told to need some: parallelize the bare base with "
                "ParallelConfig(require_adapters=False)."
            )
        if isinstance(state.bare, Exception):
            raise ValueError(
                f"the base cannot be copied ({type(state.bare).__name__}: {state.bare}), and adapters are drawn on a "
                "copy without values: let its modules be copied by copy.deepcopy."
            )
        if state.config.sequence_parallel:
            raise ValueError("tenants need all tokens of a sample on one rank: leave sequence_parallel=False.")
        if budget is not None and budget <= 0:
            raise ValueError(f"budget={budget}: give a positive number of bytes, or None for no limit.")
        self.model = model
        self._budget = budget
        self._shards = state.mesh if shard and state.mesh["dp_shard"].size() > 1 else None
        self._state: ParallelState = state
        self._bare: nn.Module = state.bare
        self._places = {name: module for module, name in clean_names(model).items()}
        self._tenants: dict[str, _Tenant] = {}
        self._layers: dict[str, TenantLayer] = {}
        self._route: Route | None = None
        self._calls = 0
        """A number that ranks share as long as they have made the same calls."""

        for parameter in model.parameters():
            parameter.requires_grad_(False)
        self._base = base_fingerprints(model, state.mesh)
        model.register_forward_pre_hook(self._count_forward)

    # ------------------------------------------------------------------ queries

    def names(self) -> list[str]:
        """The tenants, in the order in which they were added."""
        return list(self._tenants)

    def parameters(self, name: str) -> list[nn.Parameter]:
        """A tenant's parameters, as its optimizer was given them."""
        return [factor.parameter for factor in self._tenant(name).factors]

    def memory(self) -> dict[str, dict[str, int]]:
        """The bytes that this rank holds: by tenant, of its adapter, gradients and optimizer state; under "", of the
        base.
        """
        found = {"": {"base": sum(local(p).nbytes for p in self._base_parameters())}}
        for name, tenant in self._tenants.items():
            assert tenant.optimizer is not None
            parameters = [factor.parameter for factor in tenant.factors]
            waiting = [each for factor in tenant.factors for each in (factor.parameter.grad, factor.waiting)]
            gradients = [each for each in (*tenant.finished, *waiting) if each is not None]
            states = [leaf for leaf in tree_leaves(dict(tenant.optimizer.state)) if isinstance(leaf, Tensor)]
            found[name] = {
                "adapter": sum(local(each).nbytes for each in parameters),
                "gradients": sum(local(each).nbytes for each in gradients),
                "optimizer": sum(local(each).nbytes for each in states),
            }
        return found

    def _base_parameters(self) -> list[nn.Parameter]:
        own = {parameter for tenant in self._tenants.values() for parameter in self.parameters(tenant.name)}
        return [parameter for parameter in self.model.parameters() if parameter not in own]

    def _tenant(self, name: str) -> _Tenant:
        if name not in self._tenants:
            there = ", ".join(repr(each) for each in self._tenants) or "none"
            raise ValueError(f"there is no tenant {name!r}: the pool has {there}.")
        return self._tenants[name]

    # ------------------------------------------------------------------ coming and going

    def add(self, name: str, config: LoraConfig, optimizer: Optimizers, init_seed: int) -> None:
        """Add a tenant.

        Its adapter starts as that of `torch.manual_seed(init_seed); get_peft_model(model, config)` in one process.

        Args:
            name: As PEFT will name the adapter.
            config: Plain LoRA on linear layers.
            optimizer: Makes an optimizer of its parameters: `lambda parameters: AdamW(parameters, lr=1e-4)`.
            init_seed: What its adapter, and its dropout, are drawn from.

        Raises:
            ValueError: There is a tenant of this name; the config asks for something else than plain LoRA, or targets
                what the base does not have.
        """
        with self._together(f"add({name!r}, {described(config)}, init_seed={init_seed})"):
            self._check_idle("add")
            if name in self._tenants:
                raise ValueError(f"there is a tenant {name!r} already: give another name, or remove it first.")
            _check_name(name)
            _check_config(config)
            shapes = self._shaped(name, config)
        with agreed():
            tenant = _Tenant(name, shapes.peft_config[name], init_seed)
            self._tenants[name] = tenant
            try:
                self._draw(tenant, config, shapes, init_seed)
                self._check_budget(tenant, optimizer)
                tenant.optimizer = optimizer([factor.parameter for factor in tenant.factors])
            except BaseException:
                self._discard(tenant)
                raise
            tenant.finished = [None] * len(tenant.factors)
        self._tell_peft()

    def remove(self, name: str) -> None:
        """Let go of a tenant: its adapter, its optimizer and what they hold."""
        with self._together(f"remove({name!r})"):
            self._check_idle("remove")
            tenant = self._tenant(name)
        self._discard(tenant)
        self._tell_peft()

    def _check_idle(self, what: str) -> None:
        if in_backward() or self._route is not None:
            where = "during a backward" if in_backward() else "inside of train() or route()"
            raise ValueError(f"{what} was called {where}: the step is not over. Call it between steps.")

    def _check_budget(self, tenant: _Tenant, optimizer: Optimizers) -> None:
        """Raise a ValueError if a tenant takes more than is left."""
        if self._budget is None:
            return
        new = wanted([factor.parameter for factor in tenant.factors], optimizer)
        taken = sum(each.wants for each in self._tenants.values() if each is not tenant)
        if taken + new > self._budget:
            raise ValueError(
                f"the tenant {tenant.name!r} takes {new:,} bytes on a rank (adapter, gradients, optimizer state), and "
                f"{max(self._budget - taken, 0):,} of the budget of {self._budget:,} are left: remove a tenant, lower "
                "r, share adapters out with shard=True, or raise the budget."
            )
        tenant.wants = new

    def _shaped(self, name: str, config: LoraConfig) -> Any:
        """The bare base with the adapter, on meta: which layers it is on, and what they are."""
        with seeded(0), observe_layers(lambda layer: None):
            return get_peft_model(without_values(self._bare, {}), copy.deepcopy(config), adapter_name=name)

    def _draw(self, tenant: _Tenant, config: LoraConfig, shapes: Any, seed: int) -> None:
        names = [(name, layer) for layer, name in clean_names(shapes).items() if isinstance(layer, LoraLayer)]
        remaining = iter(names)

        def keep(drawn: nn.Module) -> None:
            name, shape = next(remaining)
            self._graft(tenant, name, shape, drawn, seed)

        with seeded(seed), observe_layers(keep):
            get_peft_model(without_values(self._bare, {}), copy.deepcopy(config), adapter_name=tenant.name)

    def _graft(self, tenant: _Tenant, name: str, shape: Any, drawn: Any, seed: int) -> None:
        """Put an adapter that was drawn on a layer of the model."""
        device = self._state.mesh.device_type
        for role in ("lora_A", "lora_B"):
            meta, values = getattr(shape, role)[tenant.name], getattr(drawn, role)[tenant.name]
            meta.weight = nn.Parameter(values.weight.detach().to(device, meta.weight.dtype))
        dropout = shape.lora_dropout[tenant.name]
        if type(dropout) is nn.Dropout and dropout.p > 0:
            count, rank = self._state.forward_count, dp_rank(self._state.mesh)
            own = TopologyInvariantDropout(dropout.p, name, seed, count, rank)
            shape.lora_dropout[tenant.name] = own
        if name not in self._layers:
            base = self._places[name]
            shape.base_layer = base
            _put(self.model, base, shape)
            current = self._state.forward_count
            self._layers[name] = TenantLayer(
                shape, name, lambda: self._route, lambda: current.current, self._state.config.param_dtype
            )
            shape.train(self.model.training)
        else:
            layer = self._layers[name].layer
            for attribute in (*layer.adapter_layer_names, *layer.other_param_names):
                there, new = getattr(layer, attribute), getattr(shape, attribute)
                if tenant.name in new:
                    there[tenant.name] = new[tenant.name]
            layer.train(self.model.training)
        self._layers[name].add(tenant.name, self._shards)
        tenant.layers.append(self._layers[name])

    def _discard(self, tenant: _Tenant) -> None:
        for layer in tenant.layers:
            del layer.factors[tenant.name]
            layer.layer.delete_adapter(tenant.name)
            if not layer.factors:
                _put(self.model, layer.layer, layer.restore())
                del self._layers[layer.name]
        self._tenants.pop(tenant.name, None)

    def _tell_peft(self) -> None:
        """Keep what PEFT and transformers say of the model's adapters true."""
        configs = {name: tenant.config for name, tenant in self._tenants.items()}
        self.model.peft_config = configs  # type: ignore[assignment]
        if hasattr(self.model, "_hf_peft_config_loaded"):
            self.model._hf_peft_config_loaded = bool(configs)  # type: ignore[assignment]
        self._activate(())

    def _activate(self, names: Sequence[str]) -> None:
        for layer in self._layers.values():
            layer.layer.set_adapter([name for name in names if name in layer.factors])

    # ------------------------------------------------------------------ training

    @contextmanager
    def train(self, name: str) -> Iterator[None]:
        """Around forward and backward: all samples are of one tenant, as many on every data-parallel rank.

        Its gradient is that of the mean over the ranks' losses.
        """
        with self._together(f"train({name!r})"):
            self._check_idle("train")
            self._tenant(name)
        weight = 1 / dp_size(self._state.mesh)
        with self._routed(Route((name,), None, None, {name: weight}, {name: 0})):
            yield

    @contextmanager
    def route(self, names: Sequence[str], lengths: Sequence[int] | None = None) -> Iterator[None]:
        """Around forward and backward: each sample is of the tenant that is named.

        With a loss that is the sum over tenants of each one's mean over its own samples here, each tenant's gradient is
        that of its mean over all of its samples, however many each data-parallel rank has.

        Args:
            names: The tenant of each row of this rank's batch; tp peers have the same.
            lengths: Of packed rows: the tokens of each sample, in order; `names` are those of the samples then.
        """
        with self._together("route(...)"):
            self._check_idle("route")
            for name in names:
                self._tenant(name)
            if not len(names):
                raise ValueError("route names no sample: give the tenant of each row.")
            if lengths is not None and len(lengths) != len(names):
                raise ValueError(f"route names {len(names)} samples, and gives {len(lengths)} lengths: one for each.")
        counts = self._counts(names, lengths)
        mine, total = dp_rank(self._state.mesh), counts.sum(0)
        tenants = [name for name, number in zip(self._tenants, total.tolist(), strict=True) if number]
        index = {name: number for number, name in enumerate(self._tenants)}
        route = Route(
            tuple(tenants),
            tuple(names),
            None if lengths is None else tuple(lengths),
            {name: (counts[mine, index[name]] / total[index[name]]).item() for name in tenants},
            {name: int(counts[:mine, index[name]].sum()) for name in tenants},
        )
        with self._routed(route):
            yield

    def _counts(self, names: Sequence[str], lengths: Sequence[int] | None) -> Tensor:
        """How many samples of each tenant each data-parallel rank has: int64 [dp, tenants]."""
        digest = _number(f"{list(names)} {None if lengths is None else list(lengths)}")
        own = [list(names).count(name) for name in self._tenants]
        everyone = gather_numbers([digest, *own], self._state.mesh.device_type)
        tp = self._state.mesh["tp"].size()
        everyone = everyone.view(-1, tp, everyone.shape[1])
        for rank, peers in enumerate(everyone):
            if len(peers[:, 0].unique()) > 1:
                raise ValueError(
                    f"route: the tp ranks of data-parallel rank {rank} name other samples: give them the same batch."
                )
        return everyone[:, 0, 1:]

    @contextmanager
    def _routed(self, route: Route) -> Iterator[None]:
        self._activate(route.tenants)
        self._route = route
        factors = [f for name in route.tenants for f in self._tenants[name].factors] if self._shards else []
        try:
            if self._shards is not None:
                cuts = [factor.cut for factor in factors if factor.cut is not None]
                gathered = gather([factor.parameter for factor in factors], cuts, self._shards)
                for factor, whole in zip(factors, gathered, strict=True):
                    factor.lend(whole)
            yield
        finally:
            for factor in factors:
                factor.take_back()
            self._route = None
            self._activate(())

    def _count_forward(self, model: nn.Module, args: Any) -> None:
        if self._route is None or in_backward() or not model.training:
            return
        for name in self._route.tenants:
            self._tenants[name].forwards += 1
        self._route.forwards[self._state.forward_count.current] = {
            name: self._tenants[name].forwards for name in self._route.tenants
        }

    # ------------------------------------------------------------------ on disk

    def save(self, name: str, directory: str | os.PathLike[str]) -> Path:
        """Write a tenant: an ordinary adapter folder, with the state of its training beside the adapter.

        Args:
            name: The tenant.
            directory: The folder. In one that exists the files are replaced.

        Raises:
            ValueError: There is no such tenant, or gradients of it wait for a step and would be lost.
            OSError: It cannot be written. All on every rank.
        """
        with self._together(f"save({name!r}, {str(directory)!r})"):
            self._check_idle("save")
            tenant, folder = self._tenant(name), local_path(directory)
            finished = any(each is not None for each in tenant.finished)
            if finished or any(factor.has_gradient for factor in tenant.factors):
                raise ValueError(
                    f"save: gradients of {name!r} wait for a step and would be lost: call step or zero_grad."
                )
        assert tenant.optimizer is not None
        record = {"steps": tenant.steps, "forwards": tenant.forwards, "seed": tenant.seed}
        save_tenant(self.model, name, folder, tenant.optimizer, record, self._base)
        return folder

    def load(self, name: str, directory: str | os.PathLike[str]) -> None:
        """Fill a tenant from a folder that `save` (on any mesh) or PEFT wrote. Nothing is changed unless all fits.

        From PEFT's, or without its state, the tenant starts with the adapter and a new optimizer state.

        Args:
            name: The tenant, added with the folder's config.
            directory: The folder.

        Raises:
            FileNotFoundError, ValueError: It is no folder of an adapter like the tenant's, or was trained on another
                base. On every rank.
        """
        with self._together(f"load({name!r}, {str(directory)!r})"):
            self._check_idle("load")
            tenant, folder = self._tenant(name), local_path(directory)
        assert tenant.optimizer is not None
        record = load_tenant(self.model, name, folder, tenant.optimizer, self._base) or {}
        tenant.steps, tenant.forwards = record.get("steps", 0), record.get("forwards", 0)
        tenant.seed = record.get("seed", tenant.seed)
        for layer in tenant.layers:
            layer.reseed(name, tenant.seed)
        self._zero(tenant)

    # ------------------------------------------------------------------ steps

    def step(self, name: str) -> None:
        """Finish the gradients, of this tenant and of all others that wait; let its optimizer step; zero its gradients.

        The first step after a backward communicates, for all tenants; those of the others do not.
        """
        self._check_idle("step")
        tenant = self._tenant(name)
        self._reduce(f"step({name!r})")
        for factor, gradient in zip(tenant.factors, tenant.finished, strict=True):
            factor.parameter.grad = gradient
        assert tenant.optimizer is not None
        tenant.optimizer.step()
        tenant.steps += 1
        self._zero(tenant)

    def zero_grad(self, name: str) -> None:
        """Drop a tenant's gradients. Without communication."""
        self._zero(self._tenant(name))
        self._calls = _number(f"{self._calls} zero_grad({name!r})")

    def _zero(self, tenant: _Tenant) -> None:
        tenant.finished = [None] * len(tenant.finished)
        for factor in tenant.factors:
            factor.drop_gradient()

    def _reduce(self, call: str) -> None:
        waiting = [t for t in self._tenants.values() if any(factor.has_gradient for factor in t.factors)]
        if not waiting:
            self._calls = _number(f"{self._calls} {call}")
            return
        with self._together(f"{call} with gradients of {[tenant.name for tenant in waiting]}"):
            pass
        sums = iter(finish([factor for tenant in waiting for factor in tenant.factors], self._state.mesh))
        for tenant in waiting:
            tenant.finished = [
                before if new is None else new if before is None else before + new
                for before, new in zip(tenant.finished, [next(sums) for _ in tenant.factors], strict=True)
            ]

    # ------------------------------------------------------------------ agreement

    @contextmanager
    def _together(self, call: str) -> Iterator[None]:
        """Run checks without collectives, and check that every rank makes the same call after the same calls.

        One message of two numbers, whatever the tenants.

        Raises:
            ValueError: One does not, on every rank that makes any.
            Exception: What a check raised on any rank.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        after = _number(f"{self._calls} {call}")
        numbers = gather_numbers([after, error is not None], self._state.mesh.device_type)
        if len(numbers[:, 0].unique()) > 1:
            everyone = [call] * len(numbers)
            if len(numbers) > 1:
                dist.all_gather_object(everyone, f"{call}, with tenants {list(self._tenants)}")
            other = next(rank for rank, text in enumerate(everyone) if text != everyone[0] or rank + 1 == len(numbers))
            raise ValueError(
                f"ranks make different calls of the pool: rank 0 {everyone[0]}; rank {other} {everyone[other]}. Make "
                "the same calls in the same order on every rank."
            )
        if numbers[:, 1].any():
            with agreed():
                if error is not None:
                    raise error
        self._calls = after


def described(config: Any) -> str:
    """A config by what it says otherwise than by default, the same in every process: sets have an order of their own in
    each.
    """
    if not isinstance(config, LoraConfig):
        return repr(config)
    usual = LoraConfig().to_dict()
    said = {key: value for key, value in config.to_dict().items() if value != usual.get(key)}
    ordered = {key: sorted(value) if isinstance(value, set) else value for key, value in said.items()}
    return f"LoraConfig({', '.join(f'{key}={value!r}' for key, value in sorted(ordered.items()))})"


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"a tenant's name is {name!r}: give letters, digits and underscores, as for a Python name.")


_PLAIN = {
    "modules_to_save": None,
    "bias": "none",
    "use_dora": False,
    "lora_bias": False,
    "target_parameters": None,
    "trainable_token_indices": None,
    "layer_replication": None,
}


def _check_config(config: Any) -> None:
    if not isinstance(config, LoraConfig):
        raise ValueError(f"config is a {type(config).__name__}: give a peft.LoraConfig.")
    for key, plain in _PLAIN.items():
        if getattr(config, key, plain) not in (plain, [], {}):
            raise ValueError(f"LoraConfig({key}={getattr(config, key)!r}): tenants are plain LoRA on linear layers.")
    if config.init_lora_weights not in DRAWN:
        raise ValueError(
            f"LoraConfig(init_lora_weights={config.init_lora_weights!r}) is computed from the base weights, which are "
            "sharded: load a saved adapter instead."
        )


def _put(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """`new` in place of `old`, wherever the model has it."""
    for parent in list(model.modules()):
        if parent is new:
            continue
        for key, child in list(parent._modules.items()):
            if child is old:
                parent._modules[key] = new
