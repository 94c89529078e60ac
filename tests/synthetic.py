"""Observations and rollouts without a host: what the tests of policies and of PPO share."""

from collections.abc import Callable

import torch
from torch import Tensor

from esper.leyline.actions import BLUEPRINTS, CHOICE_HEADS, HEADS, Op
from esper.simic.ppo import PPOAgent
from esper.simic.rollout import Rollout
from esper.tamiyo.policy.action_masks import ActionMasks
from esper.tamiyo.policy.factored_lstm import FactoredLSTM
from esper.tamiyo.policy.features import CRITIC_FEATURES, HOST_FEATURES, SLOT_FEATURES, Observation
from esper.tamiyo.policy.noise import action_noise

CPU = torch.device("cpu")


def random_masks(leading: tuple[int, ...], slots: int, generator: torch.Generator) -> ActionMasks:
    """WAIT everywhere and other ops in places; every third environment is forced to one op.

    Every slot has a blueprint that can live there, and never ``noop``.
    """

    def draw(*shape: int) -> Tensor:
        return torch.rand(*leading, *shape, generator=generator)

    legal = draw(len(Op), slots) < 0.5
    legal[..., Op.WAIT, :] = True
    forced = torch.randint(len(Op), leading, generator=generator)
    only = torch.nn.functional.one_hot(forced, len(Op)).bool()[..., None]
    somewhere = only & (legal | ~legal.any(-1, keepdim=True))
    legal = torch.where((draw() < 1 / 3)[..., None, None], somewhere, legal)
    kinds = draw(slots, len(BLUEPRINTS)) < 0.4
    kinds[..., 0] = False
    kinds[..., 2] |= ~kinds.any(-1)
    return ActionMasks(legal, kinds)


def random_observation(leading: tuple[int, ...], slots: int, seed: int) -> Observation:
    """Normal features and ``random_masks``."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*leading, *shape, generator=generator)

    return Observation(
        host=normal(len(HOST_FEATURES)), slots=normal(slots, len(SLOT_FEATURES)),
        blueprints=torch.randint(len(BLUEPRINTS), (*leading, slots), generator=generator),
        critic=normal(len(CRITIC_FEATURES)), masks=random_masks(leading, slots, generator),
    )  # fmt: skip


def everything_legal(observation: Observation) -> Observation:
    """The same observation with every op legal in every slot, and every blueprint but noop."""
    tensors = observation.tensors()
    tensors["mask_slots"] = torch.ones_like(tensors["mask_slots"])
    tensors["mask_kinds"] = torch.ones_like(tensors["mask_kinds"])
    tensors["mask_kinds"][..., 0] = False
    return Observation.from_tensors(tensors)


def only_op(observation: Observation, op: Op) -> Observation:
    """The same observation where ``op`` alone is legal, in every slot."""
    tensors = everything_legal(observation).tensors()
    tensors["mask_slots"] = torch.zeros_like(tensors["mask_slots"])
    tensors["mask_slots"][..., op, :] = True
    return Observation.from_tensors(tensors)


def changed(observation: Observation, **tensors: Tensor) -> Observation:
    """The observation with some of its tensors replaced."""
    return Observation.from_tensors(observation.tensors() | tensors)


def picked(observation: Observation, *index) -> Observation:
    """The observation at ``index`` of its leading axes."""
    return Observation.from_tensors(
        {name: tensor[index] for name, tensor in observation.tensors().items()}
    )


def permuted(observation: Observation, order: Tensor) -> Observation:
    """The observation whose slot i is slot ``order[i]`` of the original."""
    return Observation(
        host=observation.host,
        slots=observation.slots[..., order, :],
        blueprints=observation.blueprints[..., order],
        critic=observation.critic,
        masks=ActionMasks(
            observation.masks.slots[..., order], observation.masks.kinds[..., order, :]
        ),
    )


def canonical_action(**choices: int) -> Tensor:
    """One action, int64 ``[heads]``; heads that are not named take a canonical or first option."""
    canonical = {"style": 2, "tempo": 1, "alpha_target": 2}
    assert set(choices) <= set(HEADS)
    assert set(canonical) <= set(CHOICE_HEADS)
    return torch.tensor([(canonical | choices).get(head, 0) for head in HEADS])


def acted(
    policy: FactoredLSTM, sequence: Observation, widest: int, seed: int, episode: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Actions, log-probs and values from acting step by step on ``sequence [T, N]``."""
    steps, environments = sequence.host.shape[:2]
    streams, hidden = torch.arange(environments), policy.initial_hidden(environments)
    taken = []
    for t in range(steps):
        noise = action_noise(seed, streams, episode, t, widest)
        *said, hidden = policy.act(picked(sequence, t), hidden, noise)
        taken.append(said)
    actions, log_prob, value = (torch.stack(part) for part in zip(*taken, strict=True))
    return actions, log_prob, value


def synthetic_rollout(
    agent: PPOAgent,
    length: int,
    environments: int,
    slots: int,
    seed: int,
    episode: int = 0,
    reward: Callable[[int], Tensor] | None = None,
) -> Rollout:
    """An episode of ``random_observation``s whose clock is right, acted on by the agent.

    Rewards are normal unless ``reward(t)`` says otherwise. The last step is terminated.
    """
    generator = torch.Generator().manual_seed(seed)
    seen = random_observation((length, environments), slots, seed)
    clock = torch.arange(length) / length
    seen.host[..., HOST_FEATURES.index("progress")] = clock[:, None]
    seen.host[..., HOST_FEATURES.index("remaining")] = 1.0 - clock[:, None]
    agent.begin(torch.arange(environments), episode)
    rollout = None
    for t in range(length):
        observation = picked(seen, t)
        actions, log_prob, value = agent.act(observation, t)
        rollout = rollout or Rollout(length, observation, actions)
        rollout.write(t, observation, actions, log_prob, value)
        drawn = torch.randn(environments, generator=generator)
        rollout.outcome(t, drawn if reward is None else reward(t), t == length - 1)
    return rollout
