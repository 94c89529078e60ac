"""Bring a trained model closer to a fresh one, so that it learns on as a fresh one does."""

from copy import deepcopy
from typing import TypeVar

import torch
from torch import nn

from esper.leyline.errors import UsageError

ModelT = TypeVar("ModelT", bound=nn.Module)


def shrink_and_perturb(model: ModelT, fresh: nn.Module, share: float = 0.6) -> ModelT:
    """A copy of ``model`` with ``share`` of each parameter and the rest of that of ``fresh``.

    A network that is trained further generalises worse than one from scratch, also where it has
    become wider; after this it does not (Ash and Adams, 2020, "On warm-starting neural network
    training", section 4). What took long to learn is mostly forgotten: compare both ways.
    Parameters that require no gradient and buffers stay as they are.

    Args:
        model: trained.
        fresh: newly initialised, of the same class and sizes.
        share: of a parameter that remains, in [0, 1].

    Raises:
        UsageError: ``share`` is not in [0, 1], or the two have different parameters.
    """
    if not 0.0 <= share <= 1.0:
        raise UsageError(f"share: must lie in [0, 1], got {share}")
    copy, new = deepcopy(model), dict(fresh.named_parameters())
    mine = dict(copy.named_parameters())
    for name in [*mine, *new]:
        if name not in mine or name not in new or mine[name].shape != new[name].shape:
            raise UsageError(
                f"fresh: has another parameter {name!r} than the model; build it as the model was"
            )
    with torch.no_grad():
        for name, parameter in mine.items():
            if parameter.requires_grad:
                parameter.lerp_(new[name].to(parameter), 1.0 - share)
    return copy
