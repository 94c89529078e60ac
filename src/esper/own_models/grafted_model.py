"""A module of the user's own and its seeds: attached to it, and changed by their lifecycle.

A seed is the submodule ``seed`` of the module behind which it grows, and a forward hook of that
module calls it. Hooks are functions of this package, so that deepcopy and pickle keep them; nothing
else of the network changes. ``GraftedModel`` is the counterpart of ``tolaria.engine.Engine`` for a
single network that is trained as itself.
"""

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.kasmina.blueprints import FORM_OF_STYLE
from esper.kasmina.seed_module import FORMS, Seed, add_seed
from esper.kasmina.seeds import SeedState
from esper.kasmina.slots import SlotSpec, stack_tables
from esper.kasmina.wider_layers import parameter_count
from esper.leyline.actions import BLUEPRINTS, Style

if TYPE_CHECKING:
    from esper.tolaria.results import EpochResult

SEED = "seed"
"""Name of the submodule that holds a seed."""


REACH = 0.1
"""Norm of a branch in TRAINING, as a share of its activation's, towards which it learns."""


class _StraightThrough(torch.autograd.Function):
    """The host's activation x, behind which a branch f learns a step that lowers the loss.

    With the gradient g of the output, the branch gets the gradient of ``<g, f> + w |f|^2 / 2``,
    where ``w = |g| / (REACH |x|)``. Its minimum is ``f = -REACH |x| g / |g|``, a step of gradient
    descent in function space (Friedman, 2001). Without the second term nothing would answer to f,
    which x does not contain, and f would grow for as long as it learns.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, f: Tensor) -> Tensor:
        ctx.save_for_backward(f)
        ctx.reach = REACH * _norm(x)
        # A layer behind may work in place, which a view from here would refuse.
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (f,) = ctx.saved_tensors
        weight = _norm(gradient) / ctx.reach.clamp(min=torch.finfo(ctx.reach.dtype).tiny)
        return gradient, (gradient + weight * f).to(f.dtype)


def _norm(x: Tensor) -> Tensor:
    """The norm of ``x`` in float32, or in its own dtype if that is wider."""
    norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32))
    return norm


def learn_behind(module: nn.Module, inputs: object, output: object) -> object:
    """Forward hook of a module with a seed in TRAINING: the output itself.

    The branch sees a detached activation, and gets the gradient of the output (the straight-through
    estimator). Values and gradients of the host stay as they are without the seed.
    """
    if not torch.is_grad_enabled():
        return output
    first = output[0] if isinstance(output, tuple) else output
    assert isinstance(first, Tensor)
    seed = module.get_submodule(SEED)
    assert isinstance(seed, Seed)
    output_with_seed = _StraightThrough.apply(first, seed.branch(first.detach()))
    return (output_with_seed, *output[1:]) if isinstance(output, tuple) else output_with_seed


_HOOKS = (add_seed, learn_behind)


def new_seed(slot: SlotSpec, kind: int, form: int, random_seed: int) -> Seed:
    """A seed whose branch starts at 0, initialised as the blueprint says.

    Torch's global generator is not used, so that growing shifts no other random number.

    Args:
        slot: slot of the seed.
        kind: index of its blueprint, one of ``slot.kinds``.
        form: index of ``FORMS``.
        random_seed: determines the initial weights.
    """
    generator = torch.Generator().manual_seed(random_seed)
    return Seed(BLUEPRINTS[kind], slot.channels, slot.family, FORMS[form], generator)


def attach(model: nn.Module, name: str, seed: Seed) -> None:
    """Hang ``seed`` behind a module of ``model``; it computes nothing yet.

    The seed gets device and dtype of the module's first floating-point parameter, or of its
    nearest ancestor's that has one.

    Args:
        model: the whole module.
        name: name of the module behind which the seed hangs.
        seed: a new seed.

    Raises:
        AttributeError: ``model`` has no module of that name.
    """
    module = model.get_submodule(name)
    example = _example(model, name)
    if example is not None:
        seed.to(example.device, example.dtype)
    module.add_module(SEED, seed)


def _example(model: nn.Module, name: str) -> Tensor | None:
    """The first floating-point parameter of a module, else of its nearest ancestor with one."""
    while True:
        for parameter in model.get_submodule(name).parameters():
            if parameter.is_floating_point():
                return parameter
        if not name:
            return None
        name = name.rpartition(".")[0]


def set_hook(module: nn.Module, hook: Any) -> None:
    """Let ``hook`` (``add_seed``, ``learn_behind`` or None) call the seed of ``module``."""
    hooks = {key: each for key, each in module._forward_hooks.items() if each in _HOOKS}
    if list(hooks.values()) == ([] if hook is None else [hook]):
        return
    for key in hooks:
        del module._forward_hooks[key]
    if hook is not None:
        module.register_forward_hook(hook)
    if "torch._dynamo" in sys.modules:
        # Compiled code does not notice a changed hook.
        torch.compiler.reset()


def detach(module: nn.Module) -> None:
    """Take the seed of ``module`` off."""
    set_hook(module, None)
    del module._modules[SEED]


def grown_seeds(model: nn.Module) -> dict[str, Seed]:
    """The seeds of ``model`` by the name of the module behind which they hang."""
    candidates = ((name, module._modules.get(SEED)) for name, module in model.named_modules())
    return {name: seed for name, seed in candidates if isinstance(seed, Seed)}


def strip(model: nn.Module) -> nn.Module:
    """Take all seeds off ``model``, in place: parameters, names and hooks are the host's alone.

    Returns:
        ``model``.
    """
    for name in list(grown_seeds(model)):
        detach(model.get_submodule(name))
    return model


SEED_GROUP = "seeds"
"""Name of an optimizer's group into which all seeds go, if there is one."""


def copied_state(model: nn.Module) -> dict[str, Any]:
    """The state of ``model`` with copies of its tensors, on the CPU."""
    state = model.state_dict().items()
    return {n: x.detach().cpu().clone() if isinstance(x, Tensor) else x for n, x in state}


def updates(optimizer: Optimizer, model: nn.Module) -> bool:
    """Whether ``optimizer`` has a parameter of ``model``."""
    identities = {id(p) for p in model.parameters()}
    return any(id(p) in identities for group in optimizer.param_groups for p in group["params"])


def optimizer_of(optimizer: Optimizer, model: nn.Module, twin: nn.Module) -> Optimizer:
    """A copy of an optimizer of ``model`` that has not stepped, for ``twin``.

    Args:
        optimizer: its groups and their settings are copied.
        model: the module whose parameters it has; parameters of seeds are left out.
        twin: a copy of the module as it was before it grew.
    """
    parameters, twins = dict(model.named_parameters()), dict(twin.named_parameters())
    matching = {
        id(parameters[name]): parameter for name, parameter in twins.items() if name in parameters
    }
    twin_optimizer = copy.deepcopy(optimizer, dict(matching))
    twin_identities = {id(parameter) for parameter in twins.values()}
    for group in twin_optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) in twin_identities]
    return twin_optimizer


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
        self,
        model: nn.Module,
        slots: tuple[SlotSpec, ...],
        optimizer: Optimizer,
        episode_length: int,
        random_seed: int,
    ):
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
            loss=torch.tensor([loss], dtype=torch.float32),
            accuracy=torch.full((1,), float("nan")),
            host_gradient_norm=host_norm.view(1),
            seed_gradient_norm=unknown,
            seed_tensor_norms=tensor_norms,
            slots=torch.full((1, len(self.slots), len(SLOT_MEASURES)), float("nan")),
        )
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
