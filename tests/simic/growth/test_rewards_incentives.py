"""Incentives: better hosts earn more, size and churn cost, and no cycle of actions earns reward."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reward_support import (
    World,
    always,
    choose_at_random,
    lengths,
    play,
    quick,
    random_episode,
    seeds,
    total,
)
from torch import Tensor

from esper.kasmina.lifecycle import Rules
from esper.leyline.actions import Op
from esper.leyline.errors import UsageError
from esper.leyline.stages import Stage
from esper.simic.growth.rewards import (
    REWARD_MODES,
    REWARDS,
    RewardInputs,
    RewardOptions,
    alpha_shock,
    attribution,
    stage_shaping,
)

changes = st.floats(0.0, 0.5)
LENGTH = 40
RULES = Rules.for_horizon(LENGTH, 3)
HELD = [{"op": Op.GERMINATE, "blueprint": 7}, {"op": Op.ADVANCE}, {}, {}, {}, {"op": Op.ADVANCE}]
"""Actions after which, in 40 steps, the seed in slot 0 blends; it can be held 9 steps later."""
HOLD = [*HELD, *[{}] * 5, {"op": Op.ADVANCE}, {}, {}]


def world(length: int = LENGTH, contribution: float = 0.0) -> World:
    random = World.random(torch.Generator().manual_seed(0), length, 1, 3)
    return World.flat(random, contribution)


def returns(world: World, plan: list[dict[str, int]]) -> dict[str, float]:
    episode = play(world, always(plan))
    return {mode: total(mode, episode).item() for mode in REWARD_MODES}


@cache
def acted_on_held(op: Op, last: bool) -> RewardInputs:
    length = len(HOLD) + 1 if last else LENGTH
    return play(world(length), always([*HOLD, {"op": op}]))[len(HOLD)]


def verdict(mode: str, op: Op, contribution: float, improvement: float, last: bool) -> float:
    """Reward for acting on a held seed, without stage shaping."""
    inputs = acted_on_held(op, last)
    assert inputs.before.stage[0, 0] == Stage.HOLDING
    assert inputs.op == op
    assert inputs.last == last
    c = torch.full_like(inputs.contribution, float("nan"))
    c[0, 0] = contribution
    inputs = replace(inputs, contribution=c, score=inputs.twin_score + improvement)
    return (REWARDS[mode](inputs) - stage_shaping(inputs)).item()


# --- the traps of the prior system ------------------------------------------------------------


def test_trap_basic_pays_the_gain_of_the_episode_not_of_the_last_epoch() -> None:
    end = play(world(), always([]))[-1]
    risen = replace(
        end,
        initial_accuracy=torch.full_like(end.accuracy, 0.2),
        accuracy=torch.full_like(end.accuracy, 0.6),
    )
    assert REWARDS["basic"](risen).item() == pytest.approx(5.0 * 0.4)


@quick
@given(seed=seeds, length=lengths, accuracy=changes, score=changes)
def test_trap_an_improvement_never_earns_less_than_a_regression(
    seed, length, accuracy, score
) -> None:
    for inputs in random_episode(seed, length):
        better = replace(inputs, accuracy=inputs.accuracy + accuracy, score=inputs.score + score)
        worse = replace(inputs, accuracy=inputs.accuracy - accuracy, score=inputs.score - score)
        for mode, reward in REWARDS.items():
            low, middle, high = map(reward, (worse, inputs, better))
            assert (middle >= low - 1e-12).all(), mode
            assert (high >= middle - 1e-12).all(), mode


def test_trap_an_episode_of_improvement_earns_more_than_one_of_regression() -> None:
    flat = world()
    slope = torch.linspace(-0.2, 0.2, LENGTH + 1, dtype=torch.float64)[:, None]
    rising = replace(flat, accuracy=0.5 + slope, score=0.5 + slope)
    falling = replace(flat, accuracy=0.5 - slope, score=0.5 - slope)
    for plan in ([], HOLD, [*HOLD, {"op": Op.FOSSILISE}]):
        more, less = returns(rising, plan), returns(falling, plan)
        assert all(more[mode] > less[mode] + 1e-3 for mode in REWARD_MODES), (plan, more, less)


# --- worth and cost ---------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["terminal", "paired", "utility"])
def test_a_point_of_score_has_its_documented_reward(mode) -> None:
    end = random_episode(1, LENGTH)[-1]
    gained = REWARDS[mode](replace(end, score=end.score + 0.01)) - REWARDS[mode](end)
    expected = 0.1 / LENGTH if mode == "utility" else 0.1
    torch.testing.assert_close(gained, torch.full_like(gained, expected))


def test_paired_rewards_gain_and_charges_for_loss_and_a_better_twin() -> None:
    inputs = play(world(), always([]))[5]

    def paid(now: float, twin: float) -> float:
        settled = replace(
            inputs,
            score=torch.full_like(inputs.score, now),
            twin_score=torch.full_like(inputs.score, twin),
            previous_gain=torch.full_like(inputs.score, 0.1),
        )
        return REWARDS["paired"](settled).item()

    assert paid(0.6, 0.5) == pytest.approx(0.0, abs=1e-12)
    assert paid(0.7, 0.5) == pytest.approx(1.0)
    assert paid(0.5, 0.5) == pytest.approx(-1.0)
    assert paid(0.6, 0.6) == pytest.approx(-1.0)


@quick
@given(seed=seeds, length=lengths, more=st.integers(1, 10**6))
def test_more_parameters_never_earn_more(seed, length, more) -> None:
    for inputs in random_episode(seed, length):
        larger = replace(inputs, added_parameters=inputs.added_parameters + more)
        charged = {"terminal": inputs.last, "sparse": inputs.last, "simplified": False}
        charged["loss_change"] = inputs.step > 3
        growth = (1 + inputs.added_parameters / inputs.host_parameters).log()
        for mode, reward in REWARDS.items():
            less, paid = reward(larger), reward(inputs)
            assert (less <= paid).all(), mode
            if charged.get(mode, True):
                capped = (0.5 * growth >= 1.5) | (paid == -1)
                assert ((less < paid) | capped).all(), mode


def test_a_jump_of_alpha_costs_more_than_a_ramp() -> None:
    def shock(speed: int) -> float:
        retarget = {"op": Op.SET_ALPHA_TARGET, "alpha_target": 0, "alpha_speed": speed}
        episode = play(world(), always([*HOLD, retarget]))[len(HOLD) :]
        assert episode[-1].after.alpha[0, 0] == 0.5
        return sum(alpha_shock(inputs).item() for inputs in episode)

    assert shock(0) == pytest.approx(0.1958 * 0.25 * 7 * 37 / 500)
    assert 0.0 < shock(3) < shock(2) < shock(1) < shock(0)


def test_alpha_shock_includes_a_seed_pruned_in_the_same_step() -> None:
    inputs = play(world(), always([*HOLD, {"op": Op.PRUNE, "alpha_speed": 0}]))[len(HOLD)]
    assert not inputs.after.living.any()
    assert alpha_shock(inputs).item() == pytest.approx(0.1958 * 7 * 37 / 500)


def test_attribution_sums_over_all_seeds_not_only_the_actions() -> None:
    episode = random_episode(5, LENGTH, count=40)
    inputs = next(i for i in episode if (i.after.acting & ~_fossil(i)).sum(1).max() > 1)
    row = int((inputs.after.acting & ~_fossil(inputs)).sum(1).argmax())
    own = (inputs.after.acting & ~_fossil(inputs))[row]
    harm = torch.where(own, -0.02, inputs.contribution[row])
    contribution = inputs.contribution.clone()
    contribution[row] = harm
    paid = attribution(replace(inputs, contribution=contribution))[row].item()
    assert paid == pytest.approx(-2.0 * int(own.sum()))


def _fossil(inputs: RewardInputs) -> Tensor:
    return inputs.after.stage == Stage.FOSSILISED


def test_a_contribution_far_above_the_improvement_is_charged() -> None:
    inputs = play(world(), always(HOLD))[len(HOLD)]
    progress = torch.full_like(inputs.accuracy, 0.5)

    def paid(c: float, imp: float) -> float:
        return attribution(
            replace(
                inputs,
                contribution=torch.full_like(inputs.contribution, c / 100.0),
                accuracy=inputs.birth_accuracy[:, 0] + progress,
                score=inputs.twin_score + imp / 100.0,
            )
        ).item()

    assert paid(4.0, 1.0) == pytest.approx(4.0)
    assert paid(10.0, 1.0) == pytest.approx(10.0 - 0.1)
    assert paid(40.0, 1.0) == pytest.approx(40.0 - 0.3)
    assert paid(4.0, -1.0) < 0.1 * paid(4.0, 0.0)


@pytest.mark.parametrize("mode", ["shaped", "basic"])
@pytest.mark.parametrize("last", [False, True])
@quick
@given(good=st.floats(0.01, 1.0), bad=st.floats(-1.0, -1e-6), improvement=st.floats(-0.5, 0.5))
def test_fossilising_a_helpful_seed_earns_more_than_a_harmful_one(
    mode, last, good, bad, improvement
) -> None:
    helpful = verdict(mode, Op.FOSSILISE, good, improvement, last)
    assert helpful > verdict(mode, Op.FOSSILISE, bad, improvement, last)


@pytest.mark.parametrize("mode", ["shaped", "basic"])
@quick
@given(good=st.floats(0.01, 1.0), bad=st.floats(-1.0, -1e-6), improvement=st.floats(1e-3, 0.5))
def test_keeping_helpful_seeds_and_pruning_harmful_ones_earns_more(
    mode, good, bad, improvement
) -> None:
    nothing = float("nan")  # a seed pruned in this step is not measured
    pruned = verdict(mode, Op.PRUNE, nothing, improvement, last=False)
    assert verdict(mode, Op.FOSSILISE, good, improvement, last=False) > pruned
    # The alpha shock of pruning is due to the jump of alpha, not to the operation.
    jump = 0.1958 * 7 * 37 / 500 if mode == "shaped" else 0.0
    assert verdict(mode, Op.FOSSILISE, bad, improvement, last=False) < pruned + jump


def test_simplified_counts_the_fossils_that_contribute() -> None:
    kept = [*HOLD, {"op": Op.FOSSILISE}]
    idle = returns(world(), [])["simplified"]
    price = 0.01 * sum(bool(action) for action in kept)
    assert returns(world(contribution=0.011), kept)["simplified"] == pytest.approx(idle + 2 - price)
    assert returns(world(contribution=0.009), kept)["simplified"] == pytest.approx(idle - price)


# --- modes of the prior system ---------------------------------------------------------------


def differences(mode: str, option: str, value: float) -> list[tuple[RewardInputs, Tensor]]:
    """Steps of an episode, each with the reward under an option minus that without it."""
    options = RewardOptions.of([f"{option}={value}"])
    return [
        (inputs, REWARDS[mode](replace(inputs, options=options)) - REWARDS[mode](inputs))
        for inputs in random_episode(5, LENGTH)
    ]


@pytest.mark.parametrize("mode", ["basic", "basic_plus", "sparse"])
def test_budget_and_penalty_scale_the_cost_of_parameters(mode: str) -> None:
    for option, value, factor in (("parameter_budget", 250_000, 2), ("parameter_penalty", 0.3, 3)):
        for inputs, difference in differences(mode, option, value):
            cost = 0.1 * inputs.added_parameters / 500_000
            expected = -(factor - 1.0) * cost if inputs.last or mode != "sparse" else 0.0 * cost
            torch.testing.assert_close(difference, expected, check_dtype=False)


def test_each_option_changes_its_own_quantity_alone() -> None:
    for inputs, difference in differences("basic", "accuracy_weight", 2.0):
        gained = inputs.accuracy - inputs.initial_accuracy
        torch.testing.assert_close(difference, -3.0 * gained * inputs.last)
    for inputs, difference in differences("sparse", "sparse_scale", 0.5):
        torch.testing.assert_close(difference, -0.5 * REWARDS["sparse"](inputs))
    for mode in ("shaped", "escrow", "simplified", "basic", "basic_plus"):
        for inputs, difference in differences(mode, "shaping", 0.0):
            torch.testing.assert_close(difference, -stage_shaping(inputs))
    for inputs, difference in differences("shaped", "terminal", 0.0):
        torch.testing.assert_close(difference, -5.0 * inputs.accuracy * inputs.last)
    for inputs, difference in differences("shaped", "rent_floor", 1_000_000):
        rent = (0.5 * (1 + inputs.added_parameters / inputs.host_parameters).log()).clamp(max=1.5)
        floor = 0.5 * (1 + inputs.added_parameters / 1_000_000).log()
        torch.testing.assert_close(difference, rent - floor, check_dtype=False)
    charges = torch.stack([d for _, d in differences("shaped", "anti_gaming", 0.0)])
    assert (charges >= 0).all()
    assert (charges > 0).any()


def test_an_episode_of_escrow_pays_what_fossilised_seeds_had_earned() -> None:
    """Against the same episode without attribution: what is left is the credit of the fossils."""
    held = world(contribution=0.03)
    accuracy = torch.linspace(0.3, 0.7, LENGTH + 1, dtype=torch.float64)[:, None]
    rising = replace(held, accuracy=accuracy)

    def credits(plan: list[dict[str, int]]) -> tuple[float, float]:
        episode = play(rising, always(plan))
        paid = total("escrow", episode) - total("shaped", episode)
        paid += torch.stack([attribution(inputs) for inputs in episode]).sum(0)
        return float(paid[0]), max(float(inputs.credit.max()) for inputs in episode)

    kept, most = credits([*HOLD, *[{}] * 5, {"op": Op.FOSSILISE}])
    assert kept == pytest.approx(most)
    assert 2.0 < kept <= 3.0
    for end in ([{}], [{"op": Op.PRUNE, "alpha_speed": 0}]):
        forfeited, most = credits([*HOLD, *[{}] * 5, *end])
        assert most > 2.0
        assert forfeited == pytest.approx(0.0, abs=1e-9)


def test_an_option_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^reward_options: 'budget' is unknown; there are"):
        RewardOptions.of(["budget=3"])


# --- farming ----------------------------------------------------------------------------------


@quick
@given(seeds, st.integers(5, 40), st.floats(-0.2, 0.2))
def test_no_action_earns_anything_on_an_unchanged_host(seed, length, contribution) -> None:
    generator = torch.Generator().manual_seed(seed)
    flat = World.flat(World.random(generator, length, 6, 3), contribution)
    busy = play(flat, choose_at_random(generator, banned=(Op.FOSSILISE,)))
    idle = play(flat, always([]))
    assert any((inputs.op != Op.WAIT).any() for inputs in busy)
    acted = torch.stack([inputs.op != Op.WAIT for inputs in busy]).any(0)
    for mode in ("shaped", "simplified", "basic", "sparse", "terminal", "paired", "utility"):
        gained = total(mode, busy) - total(mode, idle)
        assert (gained <= 1e-12).all(), mode
        if mode in ("shaped", "simplified"):
            assert (gained[acted] < 0).all(), mode


@pytest.mark.parametrize("develop", [0, 1, len(HELD)])
def test_cycles_of_germinating_and_pruning_never_earn(develop) -> None:
    closed = [{}] * (RULES.embargo + 3)
    young = [{}] * RULES.prune_age
    prune = {"op": Op.PRUNE, "alpha_speed": 0}
    start = HELD if develop > 1 else HELD[: 1 + develop]
    settle = [{}] * 9 if develop > 1 else young
    plan = [*start, *settle, prune, *closed] * 6
    episode = play(world(), always(plan[: LENGTH - 1]))
    germinated = sum(int(inputs.op == Op.GERMINATE) for inputs in episode)
    assert germinated >= 2
    assert sum(int(inputs.op == Op.PRUNE) for inputs in episode) >= germinated - 1
    paid, idle = returns(world(), plan[: LENGTH - 1]), returns(world(), [])
    assert paid["shaped"] <= idle["shaped"] - 0.15 * germinated + 1e-9
    assert paid["simplified"] <= idle["simplified"] - 0.01 * germinated + 1e-9
    assert paid["basic"] <= idle["basic"] + 1e-9
