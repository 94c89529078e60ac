"""A module of the user's own and the seeds in its slots, which follow the lifecycle.

The counterpart of ``tolaria.engine.Engine`` for a single network that is trained as itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.kasmina.blueprints import FORM_OF_STYLE
from esper.kasmina.seed_module import Seed, add_seed
from esper.kasmina.seeds import SeedState
from esper.kasmina.slots import SlotSpec, stack_tables
from esper.kasmina.wider_layers import parameter_count
from esper.leyline.actions import BLUEPRINTS, Style
from esper.own_models.attachment import (
    SEED_GROUP,
    attach,
    copied_state,
    detach,
    learn_behind,
    new_seed,
    set_hook,
)

if TYPE_CHECKING:
    from esper.tolaria.results import EpochResult


class GraftedModel:
    """A module, its slots and the seeds in them.

    Args:
        model: the module, without seeds.
        slots: its slots.
        optimizer: trains the module; new seeds join it, see ``_group_of``.
        episode_length: epochs of growth.
        random_seed: determines the initial weights of seeds.

    Attributes:
        order: slots of the living seeds in the order in which they joined the optimizer.
        parameter_count: parameters of the module without seeds.
        first_norms: largest gradient norm of a tensor of each seed, or of the whole module, in the
            first epoch of the seed, by slot.
    """

    def __init__(
        self, model: nn.Module, slots: tuple[SlotSpec, ...], optimizer: Optimizer,
        episode_length: int, random_seed: int,
    ):  # fmt: skip
        self.model, self.slots, self.optimizer = model, slots, optimizer
        self.episode_length, self.random_seed = episode_length, random_seed
        self.parameter_count = parameter_count(model)
        self.modules = [model.get_submodule(slot.name) for slot in slots]
        self.seeds: list[Seed | None] = [None] * len(slots)
        self.order: list[int] = []
        self.parameter_table = stack_tables(slots, "parameter_table")
        self._norms: dict[int, list[Tensor]] = {}
        self.first_norms: dict[int, float] = {}
        self._host_norm: Tensor | None = None
        self._has_norms = False
        self._computing: list[int] = []
        self._hook = optimizer.register_step_pre_hook(self._before_update)

    @property
    def host(self) -> "GraftedModel":
        """The module itself, whose ``parameter_count`` is that without seeds."""
        return self

    def seed_parameters(self, state: SeedState) -> Tensor:
        """Parameter count of each living seed, int64 ``[1, S]``; 0 in other slots."""
        indices = torch.arange(len(self.slots))
        counts = self.parameter_table[indices, state.blueprint, state.style]
        return torch.where(state.living, counts, 0)

    def germinate(self, state: SeedState, slot: int, step: int) -> None:
        """Attach the seed that germinates in ``slot``, and give it to the optimizer."""
        style = Style(int(state.style[0, slot]))
        key = (self.random_seed * 1_000_003 + step) * 1_009 + slot
        seed = new_seed(
            self.slots[slot], int(state.blueprint[0, slot]), int(FORM_OF_STYLE[style]), key
        )
        attach(self.model, self.slots[slot].name, seed)
        self.seeds[slot] = seed
        self.order.append(slot)
        self.first_norms.pop(slot, None)
        self._group_of(self.modules[slot])["params"].extend(seed.parameters())

    def show(self, state: SeedState) -> None:
        """Let every seed compute what its state says, and remove the seeds that are gone."""
        living, computing = state.living[0].tolist(), state.computing[0].tolist()
        frozen, alphas = state.frozen[0].tolist(), state.alpha[0].tolist()
        self._computing = [s for s, computes in enumerate(computing) if computes]
        for s, seed in enumerate(self.seeds):
            if seed is None:
                continue
            if not living[s]:
                self._remove(s)
                continue
            with torch.no_grad():
                seed.alpha.fill_(alphas[s])
            for parameter in seed.parameters():
                parameter.requires_grad_(not frozen[s])
                if frozen[s]:
                    parameter.grad = None
            hook = add_seed if alphas[s] > 0.0 else learn_behind
            set_hook(self.modules[s], hook if computing[s] else None)

    @contextmanager
    def without(self, slot: int) -> Iterator[None]:
        """The module with the seed of ``slot`` at alpha 0."""
        seed = self.seeds[slot]
        assert seed is not None
        alpha = seed.alpha.clone()
        seed.alpha.zero_()
        try:
            yield
        finally:
            seed.alpha.copy_(alpha)

    def clip(self, most: float) -> None:
        """Clip the gradients of the host and of each seed, each to norm ``most``.

        Separately, so that a seed does not change how its host is updated.
        """
        self._measure()
        self._has_norms = True
        nn.utils.clip_grad_norm_(self._host_parameters(), most)
        for seed in self.seeds:
            if seed is not None:
                nn.utils.clip_grad_norm_(seed.parameters(), most)

    def result(self, loss: float) -> "EpochResult":
        """What an epoch of mean loss ``loss`` shows: the gradients of its last minibatch."""
        from esper.tolaria.results import SLOT_MEASURES, EpochResult

        unknown = torch.full((1, len(self.slots)), float("nan"))
        host_norm = torch.zeros(()) if self._host_norm is None else self._host_norm.float().cpu()
        tensor_norms = []
        for s, slot in enumerate(self.slots):
            norms = torch.full((1, slot.segment_count), float("nan"))
            if s in self._norms:
                gradient_norms = torch.stack(self._norms[s]).float().cpu()
                unknown[0, s] = gradient_norms.norm()
                # How large a gradient is depends on the unit of the loss and on the activations
                # of the user's module: what explodes is ten times as large as its gradients or
                # the module's were at first.
                largest = float(torch.maximum(gradient_norms.max(), host_norm))
                first = self.first_norms.setdefault(s, largest)
                norms[0, : len(gradient_norms)] = (
                    gradient_norms / first if isfinite(first) and first > 0.0 else gradient_norms
                )
            tensor_norms.append(norms)
        result = EpochResult(
            loss=torch.tensor([loss], dtype=torch.float32), accuracy=torch.full((1,), float("nan")),
            host_gradient_norm=host_norm.view(1), seed_gradient_norm=unknown,
            seed_tensor_norms=tensor_norms,
            slots=torch.full((1, len(self.slots), len(SLOT_MEASURES)), float("nan")),
        )  # fmt: skip
        self._norms, self._host_norm = {}, None
        return result

    def snapshot(self) -> dict[str, Tensor]:
        """A copy of all parameters and buffers, on the CPU."""
        return {n: x for n, x in copied_state(self.model).items() if isinstance(x, Tensor)}

    def restore(self, snapshot: dict[str, Tensor]) -> None:
        """Load what a snapshot holds of the present modules, and clear the optimizer's state."""
        names = set(self.model.state_dict())
        self.model.load_state_dict({n: x for n, x in snapshot.items() if n in names}, strict=False)
        self.optimizer.state.clear()

    def close(self) -> None:
        """Measure no more gradients; the seeds stay."""
        self._hook.remove()

    def _remove(self, slot: int) -> None:
        """Take a seed off the module and out of the optimizer."""
        seed = self.seeds[slot]
        assert seed is not None
        identities = {id(parameter) for parameter in seed.parameters()}
        for group in self.optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in identities]
        for parameter in seed.parameters():
            self.optimizer.state.pop(parameter, None)
        detach(self.modules[slot])
        self.seeds[slot] = None
        self.order.remove(slot)

    def _group_of(self, module: nn.Module) -> dict[str, Any]:
        """The optimizer's group for a seed behind ``module``.

        A group called ``seeds``, if there is one; else the group of the last trained parameter in
        or before the module. No group is added, because schedulers know only those that exist when
        they are made.
        """
        groups = self.optimizer.param_groups
        seed_groups = [group for group in groups if group.get("name") == SEED_GROUP]
        if seed_groups:
            return seed_groups[0]
        of_parameter = {id(p): group for group in groups for p in group["params"]}
        result = groups[-1]
        inside = {id(each) for each in module.modules()}
        inside_module = False
        for each in self.model.modules():
            inside_module |= id(each) in inside
            if inside_module and id(each) not in inside:
                break
            for parameter in each.parameters(recurse=False):
                result = of_parameter.get(id(parameter), result)
        return result

    def _host_parameters(self) -> list[nn.Parameter]:
        of_seeds = {id(p) for seed in self.seeds if seed is not None for p in seed.parameters()}
        return [p for p in self.model.parameters() if id(p) not in of_seeds]

    def _before_update(self, *_: object) -> None:
        """Measure the gradients of an update, unless clipping measured them before."""
        if not self._has_norms:
            self._measure()
        self._has_norms = False

    @torch.no_grad()
    def _measure(self) -> None:
        """Norms of the gradients of host and seeds, where a seed learns; nothing is transferred."""
        if not self._computing:
            return
        host = [p.grad for p in self._host_parameters() if p.grad is not None]
        self._host_norm = nn.utils.get_total_norm(host)
        for s in self._computing:
            seed = self.seeds[s]
            assert seed is not None
            branch = seed.get_submodule(seed.blueprint)
            parameters = dict(branch.named_parameters())
            layout = self.slots[s].layouts[BLUEPRINTS.index(seed.blueprint)]
            order = [parameters[f.name] for f in layout.fields]
            zero = seed.alpha.new_zeros(())
            self._norms[s] = [zero if p.grad is None else p.grad.norm() for p in order]
