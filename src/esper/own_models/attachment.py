"""Seeds as submodules of a module of the user's own: attached to it, called by hooks, taken off.

A seed is the submodule ``seed`` of the module behind which it grows, and a forward hook of that
module calls it. Hooks are functions of this package, so that deepcopy and pickle keep them; nothing
else of the network changes.
"""

import copy
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.kasmina.seed_module import FORMS, Seed, add_seed
from esper.kasmina.slots import SlotSpec
from esper.leyline.actions import BLUEPRINTS

SEED = "seed"
"""Name of the submodule that holds a seed."""
SEED_GROUP = "seeds"
"""Name of an optimizer's group into which all seeds go, if there is one."""

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
