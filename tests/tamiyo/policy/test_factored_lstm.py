"""The recurrent policy: any number of slots, the same distribution in rollout and update."""

import itertools
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from esper import policies
from esper.kasmina.rng import Purpose
from esper.leyline.actions import CHOICE_HEADS, HEAD_WIDTHS, HEADS, RELEVANT_HEADS, Op
from esper.simic.run.checkpoint import load_latest
from esper.tamiyo.policy.factored_lstm import FactoredLSTM
from esper.tamiyo.policy.features import Observation
from esper.tamiyo.policy.noise import EpisodeNoise, action_noise
from esper.tamiyo.policy.recurrent import RecurrentPolicy
from synthetic import (
    acted,
    canonical_action,
    changed,
    everything_legal,
    only_op,
    permuted,
    picked,
    random_observation,
)

WIDTH = 16
WIDEST = len(HEADS) + 10
"""Random numbers of a head, for ten slots."""


@pytest.fixture
def policy() -> FactoredLSTM:
    """A policy with changed weights: initial heads are nearly uniform and would hide mistakes."""
    torch.manual_seed(0)
    policy = FactoredLSTM(lstm_hidden=WIDTH)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return policy


def noise(environments: int, seed: int) -> Tensor:
    streams = torch.arange(environments)
    return action_noise(seed, streams, episode=0, step=0, widest=WIDEST)


def log_probs(policy: FactoredLSTM, observation: Observation, actions: Tensor) -> Tensor:
    """Joint log-probs of several actions ``[K, heads]`` in one environment ``[1]``."""
    many = picked(observation, torch.zeros(len(actions), dtype=torch.long))
    one_step = Observation.from_tensors({k: v[None] for k, v in many.tensors().items()})
    hidden = policy.initial_hidden(len(actions))
    return policy.evaluate_actions(one_step, actions[None], hidden).log_prob[0]


def in_double(observation: Observation) -> Observation:
    tensors = observation.tensors()
    floating = {k: v.double() for k, v in tensors.items() if v.is_floating_point()}
    return changed(observation, **floating)


def every_action(observation: Observation) -> Tensor:
    """Every legal action of the single environment, with irrelevant heads canonical."""
    slots, kinds = observation.masks.slots[0], observation.masks.kinds[0]
    actions = []
    for op in Op:
        free = [head for head in CHOICE_HEADS if head in RELEVANT_HEADS[op]]
        places = slots[op].nonzero()[:, 0].tolist()
        for slot in places if "slot" in RELEVANT_HEADS[op] else places[:1]:
            options = [
                kinds[slot].nonzero()[:, 0].tolist()
                if head == "blueprint"
                else range(HEAD_WIDTHS[head])
                for head in free
            ]
            for choice in itertools.product(*options):
                named = dict(zip(free, choice, strict=True)) | {"op": int(op), "slot": slot}
                actions.append(canonical_action(**named))
    return torch.stack(actions)


# --- shared weights -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "layer", [FactoredLSTM(lstm_hidden=WIDTH).encoder[0], RecurrentPolicy(8, (2,)).actor[0]]
)
def test_hidden_layers_begin_orthogonal_with_the_gain_of_a_relu(layer) -> None:
    weight = layer.weight.detach()
    small = min(weight.shape)
    product = weight @ weight.T if len(weight) == small else weight.T @ weight
    torch.testing.assert_close(product, 2 * torch.eye(small), rtol=0, atol=1e-4)


def test_the_memory_begins_orthogonal_and_remembers_and_embeddings_are_small() -> None:
    policy = FactoredLSTM(lstm_hidden=WIDTH)
    for name, weight in policy.lstm.named_parameters():
        if "weight" in name:
            product = weight.detach().T @ weight.detach()
            torch.testing.assert_close(product, torch.eye(len(product)), rtol=0, atol=1e-4)
    forget_gate = torch.arange(4 * WIDTH) // WIDTH == 1
    assert torch.equal(policy.lstm.get_parameter("bias_ih_l0").detach(), forget_gate.float())
    embedded = [p.flatten() for name, p in policy.named_parameters() if "embedding" in name]
    assert torch.cat(embedded).std().item() == pytest.approx(0.1, rel=0.2)


def test_one_state_dict_acts_on_two_three_and_ten_slots(policy) -> None:
    weights = policy.state_dict()
    for slots in (2, 3, 10):
        other = FactoredLSTM(lstm_hidden=WIDTH)
        other.load_state_dict(weights)
        seen = random_observation((4, 300), slots, seed=slots)
        actions, log_prob, value = acted(other, seen, WIDEST, seed=1)
        assert bool(log_prob.isfinite().all())
        assert bool(value.isfinite().all())
        assert_legal(seen, actions)
        assert actions[..., 1].unique().tolist() == list(range(slots))


def assert_legal(seen: Observation, actions: Tensor) -> None:
    """Assert that each action is legal and its irrelevant heads are canonical."""
    op, slot = actions[..., 0], actions[..., 1]
    masks = seen.masks
    assert bool(masks.ops.gather(-1, op[..., None]).all())
    assert bool(masks.slots_of(op).gather(-1, slot[..., None]).all())
    options = masks.choices_of(op, slot)
    assert bool(options.gather(-1, actions[..., 2:, None]).all())


def test_permuting_slots_only_permutes_the_slot_head(policy) -> None:
    policy.double()
    slots, order = 5, torch.tensor([3, 0, 4, 1, 2])
    place = order.argsort()
    for seed in range(3):
        seen = in_double(everything_legal(random_observation((1,), slots, seed)))
        moved = permuted(seen, order)
        actions = every_action(seen)
        there = actions.clone()
        there[:, 1] = torch.where(actions[:, 0] == Op.WAIT, actions[:, 1], place[actions[:, 1]])
        here, elsewhere = log_probs(policy, seen, actions), log_probs(policy, moved, there)
        torch.testing.assert_close(elsewhere, here, rtol=0.0, atol=1e-9)

        for op in (
            Op.ADVANCE,
            Op.FOSSILISE,
        ):  # the op is forced, so the joint log-prob is that of the slot
            pointed = torch.stack([canonical_action(op=op, slot=s) for s in range(slots)])
            free = log_probs(policy, only_op(seen, op), pointed)
            after = log_probs(policy, only_op(moved, op), pointed)
            torch.testing.assert_close(after, free[order], rtol=0.0, atol=1e-9)
            assert free.std() > 0.01


def test_op_value_and_memory_are_invariant_to_slot_order(policy) -> None:
    order = torch.tensor([2, 0, 1])
    seen = everything_legal(random_observation((6, 8), 3, seed=2))
    wait = canonical_action(op=Op.WAIT).expand(6, 8, -1)
    one = policy.evaluate_actions(seen, wait, policy.initial_hidden(8))
    two = policy.evaluate_actions(permuted(seen, order), wait, policy.initial_hidden(8))
    for part in ("log_prob", "head_entropy", "value"):
        torch.testing.assert_close(getattr(two, part), getattr(one, part), rtol=0.0, atol=1e-6)


# --- distributions -------------------------------------------------------------------------


def test_probabilities_of_all_legal_actions_sum_to_one(policy) -> None:
    for seed in range(20):
        seen = random_observation((1,), 2, seed)
        total = log_probs(policy, seen, every_action(seen)).double().exp().sum()
        assert total.item() == pytest.approx(1.0, abs=1e-4)


def test_head_entropies_match_their_distributions(policy) -> None:
    """Only ADVANCE is legal, so that the joint log-probs identify op and slot."""
    seen = only_op(random_observation((1,), 4, seed=3), Op.ADVANCE)
    pointed = torch.stack([canonical_action(op=Op.ADVANCE, slot=s) for s in range(4)])
    slot = log_probs(policy, seen, pointed)
    batch = Observation.from_tensors({k: v[None] for k, v in seen.tensors().items()})
    said = policy.evaluate_actions(batch, pointed[:1][None], policy.initial_hidden(1))
    expected = -(slot.exp() * slot).sum().item()
    assert said.head_entropy[0, 0, 0].item() == 0.0
    assert said.head_entropy[0, 0, 1].item() == pytest.approx(expected, abs=1e-5)
    assert bool((said.head_entropy[0, 0, 2:] == 0.0).all())
    assert said.head_choice[0, 0].tolist() == [False, True] + [False] * 6


def test_acting_step_by_step_matches_evaluating_the_sequence(policy) -> None:
    for slots in (2, 5):
        seen = random_observation((20, 30), slots, seed=4)
        actions, log_prob, value = acted(policy, seen, WIDEST, seed=5)
        said = policy.evaluate_actions(seen, actions, policy.initial_hidden(30))
        torch.testing.assert_close(said.log_prob, log_prob, rtol=0.0, atol=1e-5)
        torch.testing.assert_close(said.value, value, rtol=0.0, atol=1e-5)
        assert set(actions[..., 0].flatten().tolist()) == {int(op) for op in Op}


def test_frozen_weights_do_not_change_the_results(policy) -> None:
    """Steps with two numbers of environments, and afterwards with other weights."""
    scenes = [random_observation((2, count), 3, seed=count) for count in (21, 5)]

    def steps() -> list[Tensor]:
        return [part for scene in scenes for part in acted(policy, scene, WIDEST, seed=5)]

    with policy.frozen_weights():
        frozen = steps()
    assert all(torch.equal(a, b) for a, b in zip(frozen, steps(), strict=True))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.5)
    changed_weights = steps()
    with policy.frozen_weights():
        again = steps()
    assert all(torch.equal(a, b) for a, b in zip(again, changed_weights, strict=True))
    assert not torch.equal(again[1], frozen[1])


def test_a_value_that_is_not_finite_stays_in_its_environment(policy) -> None:
    seen = random_observation((4, 3), 2, seed=1)
    actions, _, _ = acted(policy, seen, WIDEST, seed=5)
    spoilt = changed(seen, host=seen.host.clone())
    spoilt.host[:, 1] = float("nan")
    hidden = policy.initial_hidden(3)
    whole = policy.evaluate_actions(seen, actions, hidden)
    part = policy.evaluate_actions(spoilt, actions, hidden)
    for name in ("log_prob", "value"):
        assert torch.equal(getattr(part, name)[:, ::2], getattr(whole, name)[:, ::2])
    assert bool(part.value[:, 1].isnan().all())


def test_mode_is_the_most_probable_option_of_each_head(policy) -> None:
    seen = random_observation((40,), 3, seed=6)
    hidden = policy.initial_hidden(40)
    best, _, _, _ = policy.act(seen, hidden, None)
    batch = Observation.from_tensors({k: v[None] for k, v in seen.tensors().items()})
    at_best = policy.evaluate_actions(batch, best[None], hidden).log_prob[0]
    # Given op and slot, no other options of the choice heads are more probable.
    for seed in range(30):
        other, _, _, _ = policy.act(seen, hidden, noise(40, seed))
        same = (other[:, :2] == best[:, :2]).all(1)
        log_prob = policy.evaluate_actions(batch, other[None], hidden).log_prob[0]
        assert bool((log_prob <= at_best + 1e-6)[same].all())


def test_action_frequencies_match_the_reported_probabilities(policy) -> None:
    draws = 20_000
    seen = random_observation((1,), 2, seed=7)
    seen = everything_legal(seen)
    many = picked(seen, torch.zeros(draws, dtype=torch.long))
    actions, _, _, _ = policy.act(many, policy.initial_hidden(draws), noise(draws, 8))
    everything = every_action(seen)
    probability = log_probs(policy, seen, everything).exp()
    for column, head in enumerate(HEADS):
        for option in range(2 if head == "slot" else HEAD_WIDTHS[head]):
            expected = probability[everything[:, column] == option].sum().item()
            if head == "slot":  # WAIT has no slot
                acting = everything[:, 0] != Op.WAIT
                expected = probability[acting & (everything[:, 1] == option)].sum().item()
                found = ((actions[:, 1] == option) & (actions[:, 0] != Op.WAIT)).float().mean()
            else:
                found = (actions[:, column] == option).float().mean()
            spread = 5.0 * math.sqrt(max(expected * (1.0 - expected), 1e-5) / draws)
            assert abs(found.item() - expected) < spread, (head, option)


def test_actions_of_an_environment_do_not_depend_on_other_environments(policy) -> None:
    streams = torch.tensor([11, 5, 7])
    seen = random_observation((3,), 3, seed=9)
    together = action_noise(1, streams, episode=2, step=3, widest=13)
    for i in range(3):
        alone = action_noise(1, streams[i : i + 1], episode=2, step=3, widest=13)
        assert torch.equal(alone[0], together[i])
        mine, _, _, _ = policy.act(picked(seen, [i]), policy.initial_hidden(1), alone)
        all_three, _, _, _ = policy.act(seen, policy.initial_hidden(3), together)
        assert torch.equal(mine[0], all_three[i])


def test_noise_differs_by_seed_environment_episode_step_and_purpose() -> None:
    base = {"seed": 1, "stream": 2, "episode": 3, "step": 4, "purpose": Purpose.ACTION}

    def drawn(**change: int) -> Tensor:
        what = base | change
        streams = torch.tensor([what.pop("stream")])
        return action_noise(what.pop("seed"), streams, widest=13, **what)

    different = [drawn(**{name: 9}) for name in base] + [drawn()]
    assert len({tuple(part.flatten().tolist()) for part in different}) == len(different)
    assert different[0].shape == (1, len(HEADS), 13)
    assert all(bool(((part > 0.0) & (part < 1.0)).all()) for part in different)


# --- information flow ----------------------------------------------------------------------------


def test_critic_features_change_only_the_value(policy) -> None:
    seen = random_observation((6, 8), 3, seed=10)
    other = changed(seen, critic=seen.critic + 1.0)
    actions, log_prob, value = acted(policy, seen, WIDEST, seed=11)
    actions_2, log_prob_2, value_2 = acted(policy, other, WIDEST, seed=11)
    assert torch.equal(actions, actions_2)
    assert torch.equal(log_prob, log_prob_2)
    assert bool((value != value_2).all())
    hidden = policy.initial_hidden(8)
    one = policy.evaluate_actions(seen, actions, hidden)
    two = policy.evaluate_actions(other, actions, hidden)
    assert torch.equal(one.log_prob, two.log_prob)
    assert torch.equal(one.head_entropy, two.head_entropy)
    assert bool((one.value != two.value).all())


def test_memory_carries_earlier_observations(policy) -> None:
    seen = random_observation((5, 4), 2, seed=12)
    other = changed(seen, host=seen.host.clone())
    other.host[0] += 1.0
    wait = canonical_action(op=Op.WAIT).expand(5, 4, -1)
    hidden = policy.initial_hidden(4)
    one = policy.evaluate_actions(everything_legal(seen), wait, hidden)
    two = policy.evaluate_actions(everything_legal(other), wait, hidden)
    assert bool((one.log_prob[-1] != two.log_prob[-1]).all())


def test_the_value_does_not_depend_on_the_action(policy) -> None:
    seen = everything_legal(random_observation((3, 4), 2, seed=13))
    hidden = policy.initial_hidden(4)
    values = [
        policy.evaluate_actions(
            seen, canonical_action(op=op, slot=1, blueprint=1).expand(3, 4, -1), hidden
        ).value
        for op in Op
    ]
    assert all(torch.equal(value, values[0]) for value in values)


# --- gradients --------------------------------------------------------------------------------


def gradients(policy: FactoredLSTM, op: Op, what: str) -> dict[str, float]:
    """Largest gradient of each head's own parameters when every action is ``op``."""
    policy.zero_grad()
    seen = everything_legal(random_observation((4, 5), 3, seed=14))
    choices = {"blueprint": 1} if op == Op.GERMINATE else {}
    actions = canonical_action(op=op, slot=1, **choices).expand(4, 5, -1)
    said = policy.evaluate_actions(seen, actions, policy.initial_hidden(5))
    getattr(said, what).sum().backward()
    return {
        head: max(
            0.0 if p.grad is None else p.grad.abs().max().item()
            for p in policy.head_parameters(head)
        )
        for head in (*HEADS, "value")
    }


@pytest.mark.parametrize("op", Op)
@pytest.mark.parametrize("what", ["log_prob", "head_entropy"])
def test_irrelevant_heads_get_zero_gradient(policy, op, what) -> None:
    found = gradients(policy, op, what)
    for head in HEADS:
        if head in RELEVANT_HEADS[op]:
            assert found[head] > 0.0, head
        else:
            assert found[head] == 0.0, head
    assert found["value"] == 0.0


def test_a_head_with_one_legal_option_gets_no_gradient(policy) -> None:
    seen = only_op(random_observation((2, 3), 1, seed=15), Op.ADVANCE)
    actions = canonical_action(op=Op.ADVANCE).expand(2, 3, -1)
    said = policy.evaluate_actions(seen, actions, policy.initial_hidden(3))
    assert bool((said.log_prob == 0.0).all())
    assert not bool(said.head_choice.any())
    (said.log_prob.sum() + said.head_entropy.sum()).backward()
    for parameter in policy.parameters():
        assert parameter.grad is None or bool((parameter.grad == 0.0).all())


# --- initial policy ----------------------------------------------------------------------------


def test_a_new_policy_prefers_wait_and_advance_and_rarely_prunes() -> None:
    torch.manual_seed(1)
    policy = FactoredLSTM(lstm_hidden=32)
    for seed in range(5):
        seen = everything_legal(random_observation((1,), 2, seed))
        actions = every_action(seen)
        probability = log_probs(policy, seen, actions).exp()
        of = {op: probability[actions[:, 0] == op].sum().item() for op in Op}
        assert of[Op.ADVANCE] > 10.0 * of[Op.GERMINATE]
        assert of[Op.WAIT] > 5.0 * of[Op.GERMINATE]
        assert of[Op.PRUNE] < 0.2 * min(p for op, p in of.items() if op != Op.PRUNE)


def test_a_new_policy_chooses_slots_and_choices_uniformly() -> None:
    torch.manual_seed(2)
    policy = FactoredLSTM(lstm_hidden=32)
    seen = everything_legal(random_observation((3, 4), 3, seed=16))
    actions = canonical_action(op=Op.GERMINATE, slot=1, blueprint=1).expand(3, 4, -1)
    entropy = policy.evaluate_actions(seen, actions, policy.initial_hidden(4)).head_entropy
    widths = {"slot": 3, "blueprint": HEAD_WIDTHS["blueprint"] - 1, "style": 4, "tempo": 3}
    for head, width in widths.items():
        found = entropy[..., HEADS.index(head)]
        torch.testing.assert_close(
            found, torch.full_like(found, math.log(width)), rtol=0.0, atol=0.02
        )


def test_a_new_policy_prefers_alpha_target_one() -> None:
    """A seed with a lower target pays the price and cannot be fossilised."""
    torch.manual_seed(3)
    policy = FactoredLSTM(lstm_hidden=32)
    seen = everything_legal(random_observation((1, 64), 2, seed=17))

    def probability(target: int) -> Tensor:
        action = canonical_action(op=Op.GERMINATE, slot=1, blueprint=1, alpha_target=target)
        actions = action.expand(1, 64, -1)
        return policy.evaluate_actions(seen, actions, policy.initial_hidden(64)).log_prob.exp()

    share = probability(2) / sum(probability(target) for target in range(3))
    assert bool(((share > 0.7) & (share < 0.9)).all())


def test_episode_noise_matches_the_noise_of_each_step():
    streams = torch.tensor([4, 9])
    noise = EpisodeNoise(3, streams, episode=5, widest=7)
    for step in (0, 1, 30, 600, 2):  # 600 is beyond the block of steps drawn first
        assert torch.equal(noise.at(step), action_noise(3, streams, 5, step, 7))


def test_cached_weights_of_the_heads_do_not_take_their_gradient() -> None:
    heads = FactoredLSTM(8).choice_heads
    x = torch.randn(3, 8)
    heads.pack()
    heads(x).sum().backward()
    assert all(bool(layer.weight.grad.any()) for layer in heads.linears())
    with torch.no_grad():
        before = heads(x)
        heads.linears()[0].weight.add_(1.0)
        assert torch.equal(heads(x), before)
        heads.unpack()
        assert not torch.equal(heads(x), before)


def test_the_policy_in_the_box_fits_into_the_network_of_its_features() -> None:
    """The sizes of the network are part of what a checkpoint means."""
    checkpoint = load_latest(Path(policies.__path__[0]) / "keep-or-move")
    weights = checkpoint.parts["policy"]
    width = weights["lstm.weight_hh_l0"].shape[1]
    FactoredLSTM(width, features=checkpoint.features).load_state_dict(weights)


def test_heads_are_as_wide_as_a_small_lstm_and_at_most_128_units() -> None:
    for memory, width in ((8, 8), (128, 128), (200, 128)):
        policy = FactoredLSTM(memory)
        assert policy.op_head.hidden.out_features == width
        assert policy.choice_trunk[0].out_features == width


def test_the_sizes_of_a_recurrent_policy_are_those_of_its_checkpoints() -> None:
    state = RecurrentPolicy(4, (2,)).state_dict()
    assert state["trunks.1.encoder.0.weight"].shape == (64, 4)
    assert state["trunks.0.lstm.weight_hh_l0"].shape == (4 * 64, 64)
    assert state["value_head.0.weight"].shape == (64, 64)
