"""A newly built module is given what a state of a grown one has: seeds, blocks and widths."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from esper.kasmina.blueprints import BUILDERS, FAMILIES
from esper.kasmina.deeper_stacks import match_depth
from esper.kasmina.resizing import is_wider, resize
from esper.kasmina.seed_module import FORMS, Seed, add_seed
from esper.leyline.errors import UsageError
from esper.own_models.attachment import SEED, attach, grown_seeds, set_hook, strip


def load_grown(model: nn.Module, state: Mapping[str, Any]) -> nn.Module:
    """Give ``model`` the blocks, seeds and widths that ``state`` has, and load it, in place.

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
    before = model.state_dict()
    match_depth(model, state)
    try:
        for point in points:
            _rebuild(model, point, state)
        _check_shapes(model, state)
    except UsageError:
        match_depth(strip(model), before)
        raise
    resize(model, state)
    model.load_state_dict(state)
    return model


def reset(model: nn.Module, initial: Mapping[str, Any]) -> None:
    """Give a module, whatever grew in it, the layers of the state ``initial``, not its entries."""
    match_depth(strip(model), initial)
    resize(model, initial)


def _rebuild(model: nn.Module, point: str, state: Mapping[str, Any]) -> None:
    """Attach the seed behind the module ``point`` in the shape that ``state`` gives it."""
    prefix = f"{point}.{SEED}."
    form, layout, channels = (int(number) for number in state[f"{prefix}recipe"])
    children = {
        name.removeprefix(prefix).split(".")[0] for name in state if name.startswith(prefix)
    }
    names = {name for name in children if FAMILIES[layout] in BUILDERS.get(name, ())}
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

    def shapes(tensors: Mapping[str, Any]) -> dict[str, object]:
        return {name: getattr(value, "shape", None) for name, value in tensors.items()}

    of_model, of_state = shapes(model.state_dict()), shapes(state)
    differing = [
        name
        for name in of_model | of_state
        if of_model.get(name, 0) != of_state.get(name, 0)
        and not (name in of_state and is_wider(model, name, state[name].shape))
    ]
    if differing:
        raise UsageError(
            f"load_grown: {differing[0]!r} of the state does not fit {type(model).__name__} "
            f"({len(differing)} such names); build the model as it was built before it grew"
        )
