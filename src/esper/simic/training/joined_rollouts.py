"""Joining the rollouts of several actors into one, in the order of the environments."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from esper.simic.distributed.wire import on_device
from esper.simic.growth.merge import merge
from esper.simic.rollout import Rollout
from esper.tamiyo.policy.interface import ObservationT


def joined_rollout(
    kind: type[ObservationT], states: Sequence[dict[str, Any]], device: torch.device
) -> Rollout[ObservationT]:
    """One rollout of the environments of all actors.

    Args:
        kind: class of the observations.
        states: what ``Rollout.state`` returned, of each actor in order.
        device: device of the result, except for ``valid``.
    """
    joined = {name: _joined(name, [state[name] for state in states]) for name in states[0]}
    moved = {n: x if n == "valid" else on_device(x, device) for n, x in joined.items()}
    return Rollout.from_state(kind, moved)


def joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """The parts along ``dim``; hosts with fewer slots are padded to the widest with 0."""
    first = [part.movedim(dim, 0) for part in parts]
    order = torch.arange(sum(len(part) for part in first))
    return merge(first, order).movedim(0, dim).contiguous()


def _joined(name: str, parts: Sequence[Any]) -> Any:
    first = parts[0]
    if first is None:
        return None
    if isinstance(first, dict):
        dim = 0 if name.startswith("last_") else 1
        return {n: joined([part[n] for part in parts], dim) for n in first}
    if isinstance(first, tuple):
        return tuple(joined(states, 1) for states in zip(*parts, strict=True))
    return joined(parts, 0 if name.startswith("last_") else 1)
