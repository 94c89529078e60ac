"""Encoders of observations that plugins define, by name."""

from collections.abc import Callable
from typing import Any

from torch import nn

from esper.leyline.errors import UsageError, suggestion

Factory = Callable[[Any], nn.Module]
"""Builds an encoder for the observation space of an environment.

The module maps a batch of observations in the structure of the space to features ``[B, width]``: of
a Box ``[B, *shape]``, of Discrete and MultiDiscrete their options one-hot ``[B, options]``, of Dict
and Tuple a dictionary or tuple of these.
"""

ENCODERS: dict[str, Factory] = {}
"""Factories by name."""


def encoder(factory: Factory) -> Factory:
    """Register an encoder under the name of its factory, for ``--encoder NAME``.

    Raises:
        UsageError: the name is taken.
    """
    name = getattr(factory, "__name__", str(factory))
    if name in ENCODERS:
        raise UsageError(f"encoder: {name!r} is already registered; give the new one another name")
    ENCODERS[name] = factory
    return factory


def find_encoder(name: str) -> Factory:
    """The factory called ``name``.

    Raises:
        UsageError: there is none.
    """
    if name not in ENCODERS:
        hint = suggestion(name, ENCODERS, "give the --plugin that registers it")
        raise UsageError(f"encoder: there is none called {name!r}; {hint}")
    return ENCODERS[name]
