"""The policies that decide how a module of the user's own grows, by name."""

from collections.abc import Callable
from pkgutil import resolve_name

import torch

from esper.kasmina.slots import SlotSpec
from esper.tamiyo.baselines import Actor, NeverActor
from esper.tamiyo.heuristic import HeuristicActor
from esper.tamiyo.rule import RuleActor
from esper.tamiyo.try_and_keep import OF_OWN_MODELS

POLICIES = ("never", "heuristic", "rule")
"""Policies without a run. ``rule`` tries a seed in slot after slot and keeps those that pay."""
LEARNED = "esper.simic.tools.grow:learned_actor"
"""Makes the actor of a policy that was trained; named, because the learner lies above this."""


def actor(
    policy: str | Actor,
    slots: tuple[SlotSpec, ...],
    epochs: int,
    seed: int,
    warn: Callable[[str], None],
) -> Actor:
    """The actor called ``policy``: one in the box, or the directory of a run.

    Args:
        policy: the name; or an actor, which is returned.
        slots: slots of the module.
        epochs: epochs of training.
        seed: seed of a learned policy's draws.
        warn: told that a learned policy was trained on other hosts.

    Raises:
        UsageError: there is no such policy, or its checkpoint does not fit this version.
    """
    if not isinstance(policy, str):
        made: Actor = policy
    elif policy == "never":
        made = NeverActor()
    elif policy == "heuristic":
        made = HeuristicActor(epochs)
    elif policy == "rule":
        made = RuleActor(lambda: [slots], epochs, settings=OF_OWN_MODELS)
    else:
        made = resolve_name(LEARNED)(policy, seed, warn)
    made.begin(torch.zeros(1, dtype=torch.long), 0)
    return made
