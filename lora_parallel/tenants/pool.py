"""Add, train, save, load and remove the tenants of one frozen base: `TenantPool`."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn
from torch.distributed import DeviceMesh

from lora_parallel.adapters.base_fingerprint import base_fingerprints
from lora_parallel.distributed.collectives import all_reduce
from lora_parallel.distributed.dtensors import local, reshard, tensor_on
from lora_parallel.distributed.meetings import collective_call
from lora_parallel.distributed.mesh import dp_size
from lora_parallel.distributed.rank_checks import agreed, is_rank_zero
from lora_parallel.distributed.torch_private import in_backward
from lora_parallel.storage import local_path
from lora_parallel.tenants.layer import AdapterSlots, draw, shaped
from lora_parallel.tenants.routing import Calls, Factor, ForwardTracker, Route, gathered_factors, route_samples
from lora_parallel.tenants.state import load_tenant, save_tenant
from lora_parallel.tenants.tenant import (
    Optimizers,
    Tenant,
    batch_norms,
    check_base,
    check_dtype,
    check_fits,
    check_layers,
    check_lora_config,
    check_name,
    check_rows_apart,
    check_samples,
    describe_config,
    memory_needs,
    seed_of,
    settings_of,
)

log = logging.getLogger(__name__)


@torch.no_grad()
def _summed(factors: Sequence[Factor], mesh: DeviceMesh) -> list[Tensor | None]:
    """Take the gradients of factors, and return their sums over all ranks, placed as the parameters. Collective."""
    taken = [factor.take_gradients() for factor in factors]
    gradients, rank = [part for part, _ in taken], mesh.get_local_rank("dp_shard")
    sums: list[Tensor | None] = [None] * len(factors)
    for dtype in dict.fromkeys(factor.parameter.dtype for factor in factors):
        of_dtype = [index for index, factor in enumerate(factors) if factor.parameter.dtype == dtype]
        # Gradients that are partial over tp come first, and those that each tp rank has whole, whose mean is taken: the
        # front of the message is summed over tp, all of it over dp.
        in_front = {index for index in of_dtype if factors[index].partial or factors[index].whole}
        order = sorted(of_dtype, key=lambda index: index not in in_front)
        parts = [factors[i].zeros() if (gradient := gradients[i]) is None else gradient for i in order]
        here = [gradients[index] is not None for index in order]
        there = tensor_on(parts[0].device, here, dtype)
        if (tp := mesh["tp"].size()) > 1:
            parts = [part / tp if factors[index].whole else part for index, part in zip(order, parts, strict=True)]
        flat = torch.cat([there, *(part.reshape(-1) for part in parts)])
        if tp > 1 and in_front:
            front = slice(len(there), len(there) + sum(part.numel() for part in parts[: len(in_front)]))
            flat[front] = all_reduce(flat[front], mesh.get_group("tp"), "gradients", "tenants")
        for axis in ("dp_shard", "dp_replicate"):
            if mesh[axis].size() > 1:
                flat = all_reduce(flat, mesh.get_group(axis), "gradients", "tenants")
        # The host waits for the device only for what another rank may have.
        counts = here if all(here) else flat[: len(there)].tolist()
        values = flat[len(there) :].split([part.numel() for part in parts])
        for index, count, value, part in zip(order, counts, values, parts, strict=True):
            if count:
                sums[index] = factors[index].placed(value.view_as(part), rank)
    # The gradient of a loss term of the parameter itself is complete on every rank: it is added without a sum.
    for index, (_, complete) in enumerate(taken):
        if complete is not None:
            known = sums[index]
            sums[index] = complete if known is None else known + complete
    return sums


class TenantPool:
    """Train several LoRA adapters, one for each tenant, on one frozen base.

    Every method except the queries (`names`, `parameters`, `optimizer`, `steps`, `memory`) is collective: all ranks
    make the same calls in the same order.

    Args:
        model: The model that `parallelize` returned with `ParallelConfig(require_adapters=False)`, without adapters.
            The pool freezes it.
        shard: Shard adapters and optimizer states over the dp_shard axis. A step then gathers the adapters that it
            needs, in one message for each dtype. With False every data-parallel rank holds all adapters whole, and
            nothing is gathered.
        budget: The bytes that all tenants together may take on a rank for adapters, gradients and optimizer states;
            None: no limit.

    Raises:
        ValueError: The model cannot be the base of a pool (it was not parallelized, or has adapters or a pool already);
            or `budget` is not positive.
    """

    @collective_call("TenantPool")
    def __init__(self, model: nn.Module, shard: bool = False, budget: int | None = None) -> None:
        self._state, self._bare = check_base(model)
        if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget <= 0):
            raise ValueError(f"budget={budget!r}: give a positive number of bytes, or None for no limit.")
        self.model, self._budget, state = model, budget, self._state
        self._shards = state.mesh if shard and state.mesh["dp_shard"].size() > 1 else None
        self._tenants: dict[str, Tenant] = {}
        self._mixing = batch_norms(model)
        self._calls = Calls(self.names)
        self._forwards = ForwardTracker(model, self._count)
        self._slots = AdapterSlots(model, state, self._shards, self._forwards.current)

        reshard(model)  # after a forward FSDP2 may leave gathered parameters in place, which would be frozen instead
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        self._base = base_fingerprints(model, state.mesh)
        state.pool = self

    # ------------------------------------------------------------------ queries

    def names(self) -> list[str]:
        """Return the names of the tenants, in the order in which they were added."""
        return list(self._tenants)

    def parameters(self, name: str) -> list[nn.Parameter]:
        """Return the parameters of a tenant, as its optimizer got them."""
        return self._tenant(name).parameters

    def optimizer(self, name: str) -> torch.optim.Optimizer:
        """Return the optimizer of a tenant, for instance to set its learning rate; only `step` may step it."""
        return self._tenant(name).optimizer

    def steps(self, name: str) -> int:
        """Return the number of steps that a tenant has taken, including those of earlier jobs if it was loaded."""
        return self._tenant(name).steps

    def memory(self) -> dict[str, dict[str, int]]:
        """Return the number of bytes that this rank holds for each tenant, and for the base.

        Returns:
            For each tenant the bytes of its "adapter", of its "gathered" copies (for forwards whose graphs are still
            alive), of its "gradients" and of the state of its "optimizer"; and under the name "" those of the "base".
        """
        adapters = {parameter for tenant in self._tenants.values() for parameter in tenant.parameters}
        base = sum(local(parameter).nbytes for parameter in self.model.parameters() if parameter not in adapters)
        return {"": {"base": base}, **{name: tenant.memory() for name, tenant in self._tenants.items()}}

    def _tenant(self, name: str) -> Tenant:
        if name not in self._tenants:
            there = ", ".join(map(repr, self._tenants)) or "none"
            raise ValueError(f"there is no tenant {name!r}: the pool has {there}.")
        return self._tenants[name]

    # ------------------------------------------------------------------ adding and removing

    @torch.inference_mode(False)
    def add(
        self,
        name: str,
        config: LoraConfig,
        optimizer: Optimizers,
        init_seed: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Add a tenant with a new adapter and its optimizer.

        The adapter starts with the values that `torch.manual_seed(init_seed); get_peft_model(model, config)` gives in
        one process.

        Args:
            name: The name of the tenant, and of its adapter in PEFT.
            config: The config of the adapter: plain LoRA on linear layers.
            optimizer: Makes an optimizer of the tenant's parameters: `lambda parameters: AdamW(parameters, lr=1e-4)`.
                With a budget it is called twice, first to find out how much memory the optimizer's state takes.
            init_seed: Seed of the adapter's values and of its dropout.
            dtype: Dtype that the adapter is stored in, and computed in unless the model's `param_dtype` names another.
                None: the dtype that `get_peft_model` gives, which is float32 on a 16-bit base.

        Raises:
            ValueError: The pool has a tenant of this name; the config asks for something other than plain LoRA, or
                targets layers that the base does not have; the tenant does not fit into the budget; or another argument
                cannot work.
        """
        with self._calls.together(f"add({name!r}, {describe_config(config)}, init_seed={init_seed}, dtype={dtype})"):
            self._check_idle("add")
            if name in self._tenants:
                raise ValueError(f"there is a tenant {name!r} already: give another name, or remove it first.")
            check_name(name, self._bare)
            check_lora_config(config)
            check_dtype(dtype)
            init_seed = seed_of(init_seed)
            shapes = shaped(self._bare, name, config)
            check_layers(shapes, name, config)
            needs = None
            if self._budget is not None:
                needs = memory_needs(self._slots.factors(name, shapes, dtype), optimizer)
                check_fits(name, needs, [tenant.needs for tenant in self._tenants.values()], self._budget)
        tenant = Tenant(name, shapes.peft_config[name], init_seed, needs=needs)
        self._tenants[name] = tenant
        try:
            with agreed() as alike:

                def put(where: str, layer: Any) -> None:
                    tenant.layers.append(self._slots.put(name, init_seed, dtype, where, layer))

                draw(self._bare, shapes, name, config, init_seed, put)
                tenant.set_optimizer(made := optimizer(tenant.parameters))
                alike["optimizer"] = settings_of(made)
        except BaseException:  # after an error on any rank no rank keeps the tenant
            self._discard(tenant)
            raise
        self._tell_peft()

    def remove(self, name: str) -> None:
        """Remove a tenant, with its adapter, its gradients and its optimizer."""
        with self._calls.together(f"remove({name!r})"):
            self._check_idle("remove")
            tenant = self._tenant(name)
        self._discard(tenant)

    def _check_idle(self, what: str) -> None:
        self.recover()
        if in_backward() or self._forwards.route is not None:
            where = "during a backward" if in_backward() else "inside of train() or route()"
            raise ValueError(f"{what} was called {where}: the step is not over. Call it between steps.")
        self._slots.check_known(what, self._tenants)

    def _discard(self, tenant: Tenant) -> None:
        self._slots.remove(tenant.name)
        self._tenants.pop(tenant.name, None)
        self._forwards.trained.discard(tenant.name)
        self._tell_peft()

    def check_export(self) -> None:
        """Raise ValueError unless exactly one tenant is active: `export_merged` would merge the sum of several."""
        layers = [module for module in self.model.modules() if isinstance(module, LoraLayer)]
        tenants = sorted({name for layer in layers for name in layer.lora_A})
        active = sorted({name for layer in layers for name in layer.active_adapters} & {*tenants})
        if layers and len(active) != 1:
            raise ValueError(
                f"export_merged: the tenants {active} are active, of {tenants}: call it inside of pool.train(name), "
                "which makes one of them active."
            )

    def _tell_peft(self) -> None:
        self._slots.tell({name: tenant.config for name, tenant in self._tenants.items()})

    # ------------------------------------------------------------------ training

    @contextmanager
    def train(self, name: str) -> Iterator[None]:
        """Run forward and backward in a context in which all samples belong to one tenant.

        Every data-parallel rank must have the same number of samples. The tenant's gradient is that of the mean of the
        losses of the data-parallel ranks.

        Args:
            name: The name of the tenant.
        """
        with self._calls.together(f"train({name!r})"):
            self._check_idle("train")
            check_rows_apart(self._mixing)
            self._tenant(name)
        weight = 1 / dp_size(self._state.mesh)
        with self._routed(Route((name,), None, None, {name: weight}, {name: 0}, self._removed((name,)))):
            yield

    @contextmanager
    def route(self, names: Sequence[str], lengths: Sequence[int] | None = None) -> Iterator[None]:
        """Run forward and backward in a context in which each sample belongs to the tenant that is named for it.

        Let the loss on each rank be a sum over tenants, with one term each: the mean over the tenant's samples on that
        rank. Each tenant's gradient is then that of the mean over all of its samples, however many of them each
        data-parallel rank has.

        Args:
            names: The tenant of each row of this rank's batch, or of each sample if `lengths` is given. The tp ranks of
                one data-parallel rank give the same names.
            lengths: The number of tokens of each sample, in order, if rows are packed; None: each row is one sample.
        """
        with self._calls.together("route(...)"):
            self._check_idle("route")
            check_rows_apart(self._mixing)
            lengths = check_samples(names, lengths)
            for name in names:
                self._tenant(name)
        with self._routed(route_samples(self.names(), names, lengths, self._state.mesh, self._removed)):
            yield

    def _removed(self, names: Sequence[str]) -> Callable[[], list[str]]:
        # Weak references: the graph of a loss keeps its route alive, and must not keep removed tenants.
        there = {name: weakref.ref(self._tenants[name]) for name in names}
        return lambda: [name for name, tenant in there.items() if self._tenants.get(name, self) is not tenant()]

    @contextmanager
    def _routed(self, route: Route) -> Iterator[None]:
        self._slots.activate(route.tenants)
        try:
            with self._forwards.within(route):
                if self._shards is not None:
                    factors = [factor for name in route.tenants for factor in self._tenants[name].factors]
                    route.gathered = gathered_factors(factors, self._shards)
                yield
        finally:
            self._slots.activate(())

    def _count(self, route: Route) -> dict[str, int]:
        for name in route.tenants:
            self._tenants[name].forwards += 1
        return {name: self._tenants[name].forwards for name in route.tenants}

    # ------------------------------------------------------------------ on disk

    @torch.inference_mode(False)  # a DTensor cannot be detached in inference mode
    def save(self, name: str, directory: str | os.PathLike[str]) -> Path:
        """Write a tenant to an adapter folder of PEFT's format, with the state of its training beside the adapter.

        Every error is raised on every rank.

        Args:
            name: The name of the tenant.
            directory: The folder. Files in an existing folder are replaced.

        Returns:
            The absolute path of the folder.

        Raises:
            ValueError: There is no such tenant, or gradients of the tenant wait for a step and would be lost.
            OSError: The folder cannot be written.
        """
        with self._calls.together(f"save({name!r}, {str(directory)!r})"):
            self._check_idle("save")
            tenant, folder = self._tenant(name), local_path(directory)
            tenant.check_between_steps("save")
        save_tenant(self.model, name, folder, tenant.optimizer, tenant.record(), self._base)
        return folder

    @torch.inference_mode(False)
    def load(self, name: str, directory: str | os.PathLike[str]) -> None:
        """Fill a tenant from a folder that `save` (on any mesh) or PEFT wrote.

        Nothing is changed unless everything in the folder fits. From a folder without a training state, such as one
        that PEFT wrote, the tenant gets the adapter and a new optimizer state. Every error is raised on every rank.

        Args:
            name: The name of the tenant, which was added with the folder's config.
            directory: The folder.

        Raises:
            FileNotFoundError, ValueError: The folder holds no adapter like the tenant's, or one that was trained on
                another base; ranks find different files in it; the saved optimizer state takes more of the budget than
                the tenant was counted for; or gradients of the tenant wait for a step and would be lost.
        """
        with self._calls.together(f"load({name!r}, {str(directory)!r})"):
            self._check_idle("load")
            tenant, folder = self._tenant(name), local_path(directory)
            tenant.check_between_steps("load")
        most = None if tenant.needs is None else tenant.needs.state
        tenant.resume(load_tenant(self.model, name, folder, tenant.optimizer, self._base, most) or {})
        self._forwards.trained.discard(name)

    # ------------------------------------------------------------------ steps

    @torch.inference_mode(False)
    def step(self, name: str, max_norm: float | None = None) -> Tensor | None:
        """Step the optimizer of a tenant with its gradients, and drop these.

        The first step after a backward sums the gradients of all tenants over ranks, so that the steps of the other
        tenants need no sum. A tenant without gradients takes no step.

        Args:
            name: The name of the tenant.
            max_norm: Clip the tenant's gradients so that their total norm is at most this, as
                `torch.nn.utils.clip_grad_norm_` does; None: do not clip.

        Returns:
            The norm before clipping, the same on all ranks; None without `max_norm`.

        Raises:
            ValueError: There is no such tenant; the call is inside a backward, `train()` or `route()`; or `max_norm` is
                not positive.
        """
        self.recover()
        trained = self._forwards.trained
        waiting = [tenant for tenant in self._tenants.values() if tenant.name in trained or tenant.has_unsummed]
        there = [tenant.name for tenant in self._tenants.values() if tenant in waiting or tenant.has_sums]
        call = f"step({name!r}, max_norm={max_norm}) with gradients of {there}"
        gathers = name in self._tenants and self._tenants[name].gathers
        with self._calls.together(call) if waiting or max_norm is not None or gathers else self._calls.apart(call):
            self._check_idle("step")
            tenant = self._tenant(name)
            if max_norm is not None and not max_norm > 0:
                raise ValueError(f"max_norm={max_norm}: give a positive number, or None for no clipping.")
        sums = iter(_summed([factor for other in waiting for factor in other.factors], self._state.mesh))
        for other in waiting:
            other.add_sums([next(sums) for _ in other.factors])
        trained.difference_update(other.name for other in waiting)
        norm = tenant.step(max_norm)
        self._zero(tenant)
        return norm

    def zero_grad(self, name: str) -> None:
        """Drop the gradients of a tenant, without communication."""
        self.recover()
        with self._calls.apart(f"zero_grad({name!r})"):
            self._zero(self._tenant(name))

    def _zero(self, tenant: Tenant) -> None:
        tenant.drop_gradients()
        self._forwards.trained.discard(tenant.name)

    def recover(self) -> None:
        """Drop all gradients of tenants whose backward ended with an error; `step` and the next forward call it.

        The part that the failed backward added cannot be told from gradients that were there before.
        """
        died = self._forwards.died()
        names = [name for name in self._tenants if name in died]
        if names and is_rank_zero():
            log.warning("a backward of %s did not finish: the gradients accumulated so far are dropped.", names)
        for name in names:
            self._zero(self._tenants[name])
