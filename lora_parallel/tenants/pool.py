"""`TenantPool`: the life of a tenant, from `add` to `remove`."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig
from torch import Tensor, nn

from lora_parallel.agreement import agreed, check_alike, gather_numbers
from lora_parallel.atomic import local_path
from lora_parallel.gather import local, reshard
from lora_parallel.identity import base_fingerprints
from lora_parallel.inject import has_adapters
from lora_parallel.mesh import dp_rank, dp_size
from lora_parallel.rendezvous import collective_call
from lora_parallel.state import ParallelState, state_of
from lora_parallel.tenants.asked import (
    batch_norms,
    check_dtype,
    check_layers,
    check_name,
    check_plain,
    check_rows_apart,
    described,
    lengths_of,
    seed_of,
)
from lora_parallel.tenants.budget import Wants, state_bytes, wanted
from lora_parallel.tenants.calls import Calls, number_of
from lora_parallel.tenants.drawing import draw, shaped
from lora_parallel.tenants.driver import Driver, settings_of
from lora_parallel.tenants.factor import Factor
from lora_parallel.tenants.grafts import Grafts
from lora_parallel.tenants.layer import TenantLayer
from lora_parallel.tenants.passes import Passes
from lora_parallel.tenants.reduction import finish
from lora_parallel.tenants.route import Route
from lora_parallel.tenants.shards import gather
from lora_parallel.tenants.state import load_tenant, save_tenant
from lora_parallel.upstream import in_backward

__all__ = ["TenantPool"]

log = logging.getLogger(__name__)

Optimizers = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(eq=False)
class _Tenant:
    name: str
    config: LoraConfig
    seed: int
    """What its dropout is drawn from."""

    steps: int = 0
    wants: Wants | None = None
    """What it takes of the pool's budget; None: there is none."""

    layers: list[TenantLayer] = field(default_factory=list)
    driver: Driver | None = None
    finished: list[Tensor | None] = field(default_factory=list)
    """Of each factor: the gradient that has been summed over all ranks since the last step."""

    forwards: int = 0
    """How many training forwards it has taken part in; its dropout goes by that."""

    @property
    def has_sums(self) -> bool:
        """Whether gradients wait for its step."""
        return any(each is not None for each in self.finished)

    def waits(self) -> bool:
        """Whether gradients do, also such as have yet to be summed over ranks."""
        return self.has_sums or any(factor.has_gradient for factor in self.factors)

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

    @collective_call("TenantPool")
    def __init__(self, model: nn.Module, shard: bool = False, budget: int | None = None) -> None:
        state = state_of(model)
        if state is None:
            raise ValueError(f"this {type(model).__name__} was not parallelized; pass what parallelize returned.")
        if state.bare is None:
            raise ValueError(
                "the model has adapters of its own, or was told to need some: parallelize the bare base with "
                "ParallelConfig(require_adapters=False)."
            )
        if state.pooled or has_adapters(model):
            raise ValueError("the model has a TenantPool, or adapters of its own, already: a base has one pool.")
        if isinstance(state.bare, Exception):
            raise ValueError(
                f"the base cannot be copied ({type(state.bare).__name__}: {state.bare}), and adapters are drawn on a "
                "copy without values: let its modules be copied by copy.deepcopy."
            )
        if state.config.sequence_parallel:
            raise ValueError("tenants need all tokens of a sample on one rank: leave sequence_parallel=False.")
        if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget <= 0):
            raise ValueError(f"budget={budget!r}: give a positive number of bytes, or None for no limit.")
        self.model = model
        self._budget = budget
        self._shards = state.mesh if shard and state.mesh["dp_shard"].size() > 1 else None
        self._state: ParallelState = state
        self._bare: nn.Module = state.bare
        self._tenants: dict[str, _Tenant] = {}
        self._mixing = batch_norms(model)
        self._calls = Calls(state.mesh.device_type, self.names)
        self._passes = Passes(model, state.mesh.device_type, self._count)
        self._grafts = Grafts(model, state, self._shards, self._passes.current)

        reshard(model)  # after a forward the whole parameters stand there, and those would be frozen
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        self._base = base_fingerprints(model, state.mesh)
        state.recoveries.append(self._drop_failed)
        state.pooled = True

    # ------------------------------------------------------------------ queries

    def names(self) -> list[str]:
        """The tenants, in the order in which they were added."""
        return list(self._tenants)

    def parameters(self, name: str) -> list[nn.Parameter]:
        """A tenant's parameters, as its optimizer was given them."""
        return [factor.parameter for factor in self._tenant(name).factors]

    def optimizer(self, name: str) -> torch.optim.Optimizer:
        """A tenant's optimizer: for its learning rate."""
        driver = self._tenant(name).driver
        assert driver is not None
        return driver.optimizer

    def steps(self, name: str) -> int:
        """How many steps a tenant has taken: in all jobs, if it was loaded."""
        return self._tenant(name).steps

    def memory(self) -> dict[str, dict[str, int]]:
        """The bytes that this rank holds: by tenant, of its adapter, what is gathered of it for forwards whose graphs
        are still there, gradients and optimizer state; under "", of the base.
        """
        found = {"": {"base": sum(local(p).nbytes for p in self._base_parameters())}}
        for name, tenant in self._tenants.items():
            parameters = [factor.parameter for factor in tenant.factors]
            waiting = [each for factor in tenant.factors for each in (factor.parameter.grad, factor.waiting)]
            gradients = [each for each in (*tenant.finished, *waiting) if each is not None]
            found[name] = {
                "adapter": sum(local(each).nbytes for each in parameters),
                "gathered": sum(whole.nbytes for factor in tenant.factors for whole in factor.lent),
                "gradients": sum(local(each).nbytes for each in gradients),
                "optimizer": state_bytes(self.optimizer(name)),
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

    @torch.inference_mode(False)
    def add(
        self,
        name: str,
        config: LoraConfig,
        optimizer: Optimizers,
        init_seed: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Add a tenant.

        Its adapter starts as that of `torch.manual_seed(init_seed); get_peft_model(model, config)` in one process.

        Args:
            name: As PEFT will name the adapter.
            config: Plain LoRA on linear layers.
            optimizer: Makes an optimizer of its parameters: `lambda parameters: AdamW(parameters, lr=1e-4)`. With a
                budget it is called twice, first to see what its state takes.
            init_seed: What its adapter, and its dropout, are drawn from.
            dtype: What its adapter is stored in, and computed in unless the model's `param_dtype` says otherwise. None:
                as `get_peft_model` has it, which is float32 on a 16-bit base.

        Raises:
            ValueError: There is a tenant of this name; the config asks for something else than plain LoRA, or targets
                what the base does not have.
        """
        with self._calls.together(f"add({name!r}, {described(config)}, init_seed={init_seed}, dtype={dtype})"):
            self._check_idle("add")
            if name in self._tenants:
                raise ValueError(f"there is a tenant {name!r} already: give another name, or remove it first.")
            check_name(name, self._bare)
            check_plain(config)
            check_dtype(dtype)
            init_seed = seed_of(init_seed)
            shapes = shaped(self._bare, name, config)
            check_layers(shapes, name, config)
            wants = None if self._budget is None else self._wanted(name, shapes, optimizer, dtype)
        tenant = _Tenant(name, shapes.peft_config[name], init_seed, wants=wants)
        self._tenants[name] = tenant
        try:
            with agreed():

                def put(where: str, layer: Any) -> None:
                    tenant.layers.append(self._grafts.put(name, init_seed, dtype, where, layer))

                draw(self._bare, shapes, name, config, init_seed, put)
                parameters = [factor.parameter for factor in tenant.factors]
                made = optimizer(parameters)
                tenant.driver = Driver(name, made, parameters, tenant.waits)
            check_alike(optimizer=settings_of(made))
        except BaseException:  # on any rank: it is on none
            self._discard(tenant)
            raise
        tenant.finished = [None] * len(tenant.factors)
        self._tell_peft()

    def remove(self, name: str) -> None:
        """Let go of a tenant: its adapter, its optimizer and what they hold."""
        with self._calls.together(f"remove({name!r})"):
            self._check_idle("remove")
            tenant = self._tenant(name)
        self._discard(tenant)

    def _check_idle(self, what: str) -> None:
        self._drop_failed()
        if in_backward() or self._passes.route is not None:
            where = "during a backward" if in_backward() else "inside of train() or route()"
            raise ValueError(f"{what} was called {where}: the step is not over. Call it between steps.")
        there: Any = getattr(self.model, "peft_config", {})
        if there.keys() != self._tenants.keys():
            raise ValueError(
                f"{what}: the model has the adapters {sorted(there)}, and the tenants are {sorted(self._tenants)}: add "
                "and remove adapters of a pooled model with the pool, not with add_adapter and delete_adapter."
            )

    def _wanted(self, name: str, shapes: Any, optimizer: Optimizers, dtype: torch.dtype | None) -> Wants:
        """What a tenant will take.

        Raises:
            ValueError: It is more than is left.
        """
        factors = self._grafts.factors(name, shapes, dtype)
        wants, others = wanted(factors, optimizer), [tenant.wants for tenant in self._tenants.values()]
        taken = sum(each.total for each in others if each is not None)
        assert self._budget is not None
        if taken + wants.total > self._budget:
            raise ValueError(
                f"the tenant {name!r} takes up to {wants.total:,} bytes on a rank (adapter, gradients, optimizer "
                f"state), and {max(self._budget - taken, 0):,} of the budget of {self._budget:,} are left: remove a "
                "tenant, lower r, share adapters out with shard=True, or raise the budget."
            )
        return wants

    def _discard(self, tenant: _Tenant) -> None:
        self._grafts.remove(tenant.name)
        self._tenants.pop(tenant.name, None)
        self._passes.trained.discard(tenant.name)
        self._tell_peft()

    def _tell_peft(self) -> None:
        self._grafts.tell({name: tenant.config for name, tenant in self._tenants.items()})

    # ------------------------------------------------------------------ training

    @contextmanager
    def train(self, name: str) -> Iterator[None]:
        """Around forward and backward: all samples are of one tenant, as many on every data-parallel rank.

        Its gradient is that of the mean over the ranks' losses.
        """
        with self._calls.together(f"train({name!r})"):
            self._check_idle("train")
            check_rows_apart(self._mixing)
            self._tenant(name)
        weight = 1 / dp_size(self._state.mesh)
        with self._routed(Route((name,), None, None, {name: weight}, {name: 0}, self._gone((name,)))):
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
        with self._calls.together("route(...)"):
            self._check_idle("route")
            check_rows_apart(self._mixing)
            if isinstance(names, str) or not len(names):
                raise ValueError(f"route({names!r}) names no samples: give a list with the tenant of each row.")
            for name in names:
                self._tenant(name)
            if lengths is not None:
                lengths = lengths_of(lengths)
                if len(lengths) != len(names):
                    raise ValueError(
                        f"route names {len(names)} samples, and gives {len(lengths)} lengths: one for each."
                    )
        counts = self._counts(names, lengths)
        mine, total = dp_rank(self._state.mesh), counts.sum(0)
        tenants = [name for name, number in zip(self._tenants, total.tolist(), strict=True) if number]
        index = {name: number for number, name in enumerate(self._tenants)}
        route = Route(
            tuple(tenants),
            tuple(names),
            lengths if lengths is None else tuple(lengths),
            {name: int(counts[mine, index[name]]) / int(total[index[name]]) for name in tenants},
            {name: int(counts[:mine, index[name]].sum()) for name in tenants},
            self._gone(tenants),
        )
        with self._routed(route):
            yield

    def _gone(self, names: Sequence[str]) -> Callable[[], list[str]]:
        # Weak, since the graph of a loss that somebody keeps holds on to its route.
        there = {name: weakref.ref(self._tenants[name]) for name in names}
        return lambda: [name for name, tenant in there.items() if self._tenants.get(name, self) is not tenant()]

    def _counts(self, names: Sequence[str], lengths: Sequence[int] | None) -> Tensor:
        """How many samples of each tenant each data-parallel rank has: int64 [dp, tenants]."""
        digest = number_of(f"{list(names)} {None if lengths is None else list(lengths)}")
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
        self._grafts.activate(route.tenants)
        try:
            with self._passes.within(route):
                if self._shards is not None:
                    factors = [factor for name in route.tenants for factor in self._tenants[name].factors]
                    cuts = [factor.cut for factor in factors if factor.cut is not None]
                    gathered = gather([factor.parameter for factor in factors], cuts, self._shards)
                    route.lent = {factor: factor.lend(whole) for factor, whole in zip(factors, gathered, strict=True)}
                yield
        finally:
            self._grafts.activate(())

    def _count(self, route: Route) -> dict[str, int]:
        for name in route.tenants:
            self._tenants[name].forwards += 1
        return {name: self._tenants[name].forwards for name in route.tenants}

    # ------------------------------------------------------------------ on disk

    @torch.inference_mode(False)  # inside of which a DTensor cannot be detached
    def save(self, name: str, directory: str | os.PathLike[str]) -> Path:
        """Write a tenant: an ordinary adapter folder, with the state of its training beside the adapter.

        Args:
            name: The tenant.
            directory: The folder. In one that exists the files are replaced.

        Raises:
            ValueError: There is no such tenant, or gradients of it wait for a step and would be lost.
            OSError: It cannot be written. All on every rank.
        """
        with self._calls.together(f"save({name!r}, {str(directory)!r})"):
            self._check_idle("save")
            tenant, folder = self._between_steps("save", name), local_path(directory)
        record = {"steps": tenant.steps, "forwards": tenant.forwards, "seed": tenant.seed}
        save_tenant(self.model, name, folder, self.optimizer(name), record, self._base)
        return folder

    @torch.inference_mode(False)
    def load(self, name: str, directory: str | os.PathLike[str]) -> None:
        """Fill a tenant from a folder that `save` (on any mesh) or PEFT wrote. Nothing is changed unless all fits.

        From PEFT's, or without its state, the tenant starts with the adapter and a new optimizer state.

        Args:
            name: The tenant, added with the folder's config.
            directory: The folder.

        Raises:
            FileNotFoundError, ValueError: It is no folder of an adapter like the tenant's, or was trained on another
                base; ranks would read other files; its optimizer's state is more than the tenant may take of the
                budget; or gradients wait for a step and would be lost. On every rank.
        """
        with self._calls.together(f"load({name!r}, {str(directory)!r})"):
            self._check_idle("load")
            tenant, folder = self._between_steps("load", name), local_path(directory)
        most = None if tenant.wants is None else tenant.wants.state
        record = load_tenant(self.model, name, folder, self.optimizer(name), self._base, most) or {}
        tenant.steps, tenant.forwards = record.get("steps", 0), record.get("forwards", 0)
        tenant.seed = record.get("seed", tenant.seed)
        for layer in tenant.layers:
            layer.reseed(name, tenant.seed)
        self._zero(tenant)

    def _between_steps(self, what: str, name: str) -> _Tenant:
        tenant = self._tenant(name)
        if tenant.waits():
            raise ValueError(
                f"{what}: gradients of {name!r} wait for a step and would be lost: call step or zero_grad."
            )
        return tenant

    # ------------------------------------------------------------------ steps

    @torch.inference_mode(False)
    def step(self, name: str, max_norm: float | None = None) -> Tensor | None:
        """Finish the gradients, of this tenant and of all others that wait; let its optimizer step; zero its gradients.

        The first step after a backward communicates, for all tenants; those of the others do not. A tenant without
        gradients takes no step.

        Args:
            name: The tenant.
            max_norm: Clip its gradients first, as `torch.nn.utils.clip_grad_norm_`, to the norm of all of them.

        Returns:
            With `max_norm`, the norm before clipping: the same on all ranks.

        Raises:
            ValueError: There is no such tenant, or its step is not over.
            RuntimeError: Its optimizer does not take parameters that are on a mesh.
        """
        self._drop_failed()
        waiting = self._unsummed()
        there = [tenant.name for tenant in self._tenants.values() if tenant in waiting or tenant.has_sums]
        call = f"step({name!r}, max_norm={max_norm}) with gradients of {there}"
        with self._calls.together(call) if waiting or max_norm is not None else self._calls.apart(call):
            self._check_idle("step")
            tenant = self._tenant(name)
            if max_norm is not None and not max_norm > 0:
                raise ValueError(f"max_norm={max_norm}: give a positive number, or None for no clipping.")
        self._sum(waiting)
        assert tenant.driver is not None
        norm = tenant.driver.step(tenant.finished, max_norm)
        tenant.steps += tenant.has_sums
        self._zero(tenant)
        return norm

    def zero_grad(self, name: str) -> None:
        """Drop a tenant's gradients. Without communication."""
        self._drop_failed()
        with self._calls.apart(f"zero_grad({name!r})"):
            self._zero(self._tenant(name))

    def _zero(self, tenant: _Tenant) -> None:
        tenant.finished = [None] * len(tenant.finished)
        for factor in tenant.factors:
            factor.drop_gradients()
        self._passes.trained.discard(tenant.name)

    def _unsummed(self) -> list[_Tenant]:
        """The tenants with gradients that have not been summed over ranks. The same on all of them."""
        trained = self._passes.trained
        return [
            tenant
            for tenant in self._tenants.values()
            if tenant.name in trained or any(each.has_gradient for each in tenant.factors)
        ]

    def _sum(self, tenants: Sequence[_Tenant]) -> None:
        sums = iter(finish([factor for tenant in tenants for factor in tenant.factors], self._state.mesh))
        for tenant in tenants:
            self._passes.trained.discard(tenant.name)
            tenant.finished = [
                before if new is None else new if before is None else before + new
                for before, new in zip(tenant.finished, [next(sums) for _ in tenant.factors], strict=True)
            ]

    def _drop_failed(self) -> None:
        """If a backward died on its way: what it added cannot be told from what had come together before."""
        died = self._passes.died()
        names = [name for name in self._tenants if name in died]
        if not names:
            return
        if not dist.is_initialized() or dist.get_rank() == 0:
            log.warning("a backward of %s did not finish: the gradients accumulated so far are dropped.", names)
        for name in names:
            self._zero(self._tenants[name])
