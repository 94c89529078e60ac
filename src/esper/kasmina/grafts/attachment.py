"""Attaching seeds to the modules of a network, taking them off, and rebuilding them from a
state_dict.

A seed is the submodule ``seed`` of the module behind which it grows, and a forward hook of that
module calls it. Hooks are functions of this package, so that deepcopy and pickle keep them; nothing
else of the network changes.
"""

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints import BUILDERS, FAMILIES
from esper.kasmina.seed_module import FORMS, Seed, add_seed
from esper.kasmina.slots import SlotSpec
from esper.leyline.actions import BLUEPRINTS
from esper.leyline.errors import UsageError

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
    learned = _StraightThrough.apply(first, seed.branch(first.detach()))
    return (learned, *output[1:]) if isinstance(output, tuple) else learned


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
    found = {key: each for key, each in module._forward_hooks.items() if each in _HOOKS}
    if list(found.values()) == ([] if hook is None else [hook]):
        return
    for key in found:
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
    found = ((name, module._modules.get(SEED)) for name, module in model.named_modules())
    return {name: seed for name, seed in found if isinstance(seed, Seed)}


def strip(model: nn.Module) -> nn.Module:
    """Take all seeds off ``model``, in place: parameters, names and hooks are the host's alone.

    Returns:
        ``model``.
    """
    for name in list(grown_seeds(model)):
        detach(model.get_submodule(name))
    return model


def load_grown(model: nn.Module, state: Mapping[str, Any]) -> nn.Module:
    """Attach the seeds that ``state`` describes to ``model`` and load it, in place.

    Args:
        model: a module built like the one that was grown, without seeds.
        state: ``state_dict()`` of the grown module.

    Returns:
        ``model``, grown and trainable.

    Raises:
        UsageError: ``model`` already has seeds, ``state`` does not fit it, or a blueprint is
            unknown.
    """
    if grown_seeds(model):
        raise UsageError("load_grown: the model already has seeds; give a newly built one")
    ending = f".{SEED}.recipe"
    points = [name.removesuffix(ending) for name in state if name.endswith(ending)]
    try:
        for point in points:
            _rebuild(model, point, state)
        _check_shapes(model, state)
    except UsageError:
        strip(model)
        raise
    model.load_state_dict(state)
    return model


def _rebuild(model: nn.Module, point: str, state: Mapping[str, Any]) -> None:
    """Attach the seed behind the module ``point`` in the shape that ``state`` gives it."""
    prefix = f"{point}.{SEED}."
    form, layout, channels = (int(number) for number in state[f"{prefix}recipe"])
    own = {name.removeprefix(prefix).split(".")[0] for name in state if name.startswith(prefix)}
    names = {name for name in own if FAMILIES[layout] in BUILDERS.get(name, ())}
    if len(names) != 1:
        raise UsageError(
            f"load_grown: the seed behind {point!r} has an unknown blueprint; "
            "use the version of Esper that grew it, and the plugin that defines the blueprint"
        )
    seed = Seed(names.pop(), channels, FAMILIES[layout], FORMS[form], torch.Generator())
    try:
        attach(model, point, seed)
    except AttributeError:
        raise UsageError(
            f"load_grown: {type(model).__name__} has no module {point!r}; "
            "build the model as it was built before it grew"
        ) from None
    set_hook(model.get_submodule(point), add_seed)


def _check_shapes(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Refuse a state whose names or shapes are not those of ``model``, before anything is
    loaded."""

    def shapes(named: Mapping[str, Any]) -> dict[str, object]:
        return {name: getattr(value, "shape", None) for name, value in named.items()}

    own, given = shapes(model.state_dict()), shapes(state)
    differing = [name for name in own | given if own.get(name, 0) != given.get(name, 0)]
    if differing:
        raise UsageError(
            f"load_grown: {differing[0]!r} of the state does not fit {type(model).__name__} "
            f"({len(differing)} such names); build the model as it was built before it grew"
        )


__all__ = [
    "attach",
    "detach",
    "grown_seeds",
    "learn_behind",
    "load_grown",
    "new_seed",
    "set_hook",
    "strip",
]
