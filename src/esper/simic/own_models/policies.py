"""The policies that decide how a module of the user's own grows, by name."""

from collections.abc import Callable

import torch
from torch import Tensor

from esper.kasmina.blueprints import SHIPPED
from esper.kasmina.slots import SlotSpec
from esper.leyline.actions import BLUEPRINTS
from esper.leyline.errors import UsageError, suggestion
from esper.simic.growth.collect import Actor
from esper.tamiyo.baselines import NeverActor
from esper.tamiyo.heuristic import HeuristicActor
from esper.tamiyo.policy_box import cards, learned_path
from esper.tamiyo.try_and_keep import Trial, TryAndKeepActor

POLICIES = ("never", "heuristic", "rule")
"""Policies without a run. ``rule`` tries a seed in slot after slot and keeps those that pay."""
RULE_BLUEPRINTS = ("conv_light", "mlp_small", "mlp")
"""What ``rule`` plants: a blueprint of the user's own that a slot accepts, else the first of these.
``mlp`` generalises worse than ``mlp_small`` on small tables."""
RULE_DECISION = 0.7
"""Part of the epochs after which ``rule`` plants nothing more, prunes and fossilises."""


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
        made = TryAndKeepActor(_trial(slots, epochs))
    else:
        made = _learned(policy, seed, warn)
    made.begin(torch.zeros(1, dtype=torch.long), 0)
    return made


def _trial(slots: tuple[SlotSpec, ...], epochs: int) -> Trial:
    decision = max(1, min(round(RULE_DECISION * epochs), epochs - len(slots) - 1))

    def one(value: int) -> Tensor:
        return torch.tensor([value])

    return Trial(
        blueprint=torch.tensor([[planted_blueprint(slot) for slot in slots]]),
        start=one(1),
        decision=one(decision),
        keep=one(len(slots)),
    )


def planted_blueprint(slot: SlotSpec) -> int:
    """Index of the blueprint that ``rule`` plants in ``slot``."""
    fitting = [BLUEPRINTS[kind] for kind in slot.kinds]
    preferred = (*(name for name in fitting if name not in SHIPPED), *RULE_BLUEPRINTS)
    return BLUEPRINTS.index(next((name for name in preferred if name in fitting), fitting[0]))


def _learned(policy: str, seed: int, warn: Callable[[str], None]) -> Actor:
    from esper.simic.tools.grow import GrowingPolicy, is_run_directory

    if learned_path(policy) is None and not is_run_directory(policy):
        raise UsageError(
            f"policy: {policy!r} is neither one of {', '.join(cards())} nor a run directory; "
            + suggestion(policy, cards(), "`esper policies` describes them")
        )
    learned = GrowingPolicy.named(policy)
    named = ", ".join(learned.settings.world.task)
    warn(f"policy {policy} was trained on {named}; on a module of your own it is untested")
    agent = learned.agent(seed)
    agent.greedy = learned.greedy_by_default
    return agent
