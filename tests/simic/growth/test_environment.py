"""The growth environment end to end in float64: rewards, independence, twins, replay."""

import math
from dataclasses import dataclass, fields

import pytest
import torch
from torch import Tensor

from esper.kasmina.hosts.cnn import CnnHost
from esper.kasmina.seeds import SeedState
from esper.leyline.actions import BLUEPRINTS, Op, Style
from esper.leyline.stages import Stage
from esper.runtime import data
from esper.runtime.tasks import Task
from esper.simic.growth.environment import GrowthEnv
from esper.simic.growth.step import Step
from esper.tamiyo.policy.features import HOST_FEATURES, Observation
from esper.tolaria.plan import CHUNK
from oracles.lifecycle import seed_parameters
from support import F64, OperationCounter, needs_native, small_environments
from synthetic import canonical_action
from wishes import Wish, Wishes, wished_actions

LENGTH = 16
CHANNELS = (3, 4)
HOST_PARAMETERS = (9 * 1 * 3 + 2 * 3) + (9 * 3 * 4 + 2 * 4) + (4 * 10 + 10)


def growth_env(environments: Tensor | int, **settings) -> GrowthEnv:
    """A tiny task in float64."""
    host = CnnHost(channels=CHANNELS, classes=10, image=(8, 8, 1))
    task = Task("tiny", "digits on a tiny host", host, lambda: data.digits())
    config = {"seed": 5, "group_size": 4, "episode_length": LENGTH, "batch_size": 8, "dtype": F64}
    return small_environments([task], environments, **(config | settings))


# --- gardeners: actors that grow given seeds --------------------------------------------------


GARDEN: Wishes = {
    1: [Wish("conv_light")],
    2: [Wish("conv_heavy", style=Style.GATED_GATE, slot=1, until=Stage.HOLDING)],
    3: [Wish("attention", style=Style.LINEAR_MULTIPLY), Wish("depthwise", slot=1, start=3)],
    5: [Wish("bottleneck", style=Style.SIGMOID_ADD), Wish("conv_small", slot=1, start=3)],
    6: [Wish("conv_light", until=Stage.BLENDING, start=8)],
    7: [Wish("conv_light", slot=1), Wish("norm", start=3, until=Stage.BLENDING)],
}
"""Seeds of eight environments: fossils, unfinished seeds, two at once; 0 and 4 never grow."""


@dataclass
class Episode:
    """The recorded steps of an episode."""

    observations: list[Observation]
    actions: Tensor
    steps: list[Step]

    @property
    def rewards(self) -> Tensor:
        return torch.stack([step.reward for step in self.steps])

    def losses(self, count: int) -> Tensor:
        """Training and validation loss of the first ``count`` rows, ``[T, 2, count]``."""
        return torch.stack(
            [
                torch.stack([s.report.train_loss, s.report.scores.loss])[:, :count]
                for s in self.steps
            ]
        )

    def stages(self) -> Tensor:
        return torch.stack([step.report.after.stage for step in self.steps])


def episode(env: GrowthEnv, choose, number: int = 0) -> Episode:
    """One episode; ``choose(observation, t)`` gives the actions ``[N, heads]``."""
    observation = env.reset(number)
    observations, actions, steps = [observation], [], []
    for t in range(env.config.episode_length):
        actions.append(choose(observation, t))
        steps.append(env.step(actions[-1]))
        observation = steps[-1].observation
        observations.append(observation)
    return Episode(observations, torch.stack(actions), steps)


def grown(wishes: Wishes, env: GrowthEnv, number: int = 0) -> Episode:
    return episode(env, lambda o, t: wished_actions(wishes, env.environments, o, t), number)


@pytest.fixture(scope="module")
def garden() -> Episode:
    """Eight environments in two groups grow ``GARDEN``."""
    return grown(GARDEN, growth_env(8))


def price_of(state: SeedState, n: int, *stages: Stage) -> float:
    """Price of the seeds of environment ``n`` that are in one of the stages, by hand."""
    added = sum(
        seed_parameters(
            BLUEPRINTS[state.blueprint[n, s]], channels, state.style[n, s] == Style.GATED_GATE
        )
        for s, channels in enumerate(CHANNELS)
        if state.stage[n, s] in stages
    )
    return 0.05 * math.log(1.0 + added / HOST_PARAMETERS)


def final_gain(episode: Episode, n: int) -> tuple[float, float]:
    """Final utility of environment ``n``, and the score of its twin, by hand."""
    ends = [step.report for step in episode.steps[-3:]]
    score = sum(report.committed.expected[n].item() for report in ends) / 3.0
    other = sum(report.twin_committed.expected[n].item() for report in ends) / 3.0
    last = episode.steps[-1].report.after
    return score - price_of(last, n, Stage.FOSSILISED), other


# --- the garden meets the assumptions of the tests --------------------------------------------


def test_the_garden_contains_every_outcome_of_a_seed(garden) -> None:
    assert growth_env(1).tasks[0].host.parameter_count == HOST_PARAMETERS
    ends = [tuple(Stage(s) for s in row) for row in garden.stages()[-1].tolist()]
    empty, fossil = Stage.DORMANT, Stage.FOSSILISED
    assert ends[0] == ends[4] == (empty, empty)
    assert ends[1] == (fossil, empty)
    assert ends[2] == (empty, Stage.HOLDING)
    assert ends[3] == ends[5] == (fossil, fossil)
    assert ends[6] == (Stage.BLENDING, empty)
    assert ends[7] == (Stage.BLENDING, fossil)
    assert all(bool(step.report.success.all()) for step in garden.steps)
    assert [step.done for step in garden.steps] == [False] * (LENGTH - 1) + [True]


# --- rewards ----------------------------------------------------------------------------------


def test_the_paired_return_is_the_final_gain(garden) -> None:
    for n in range(8):
        utility, twin_score = final_gain(garden, n)
        total = garden.rewards[:, n].sum().item()
        assert total == pytest.approx(10.0 * (utility - twin_score), abs=1e-6)


def test_the_terminal_return_is_the_final_utility(garden) -> None:
    other = grown(GARDEN, growth_env(8, reward="terminal"))
    assert torch.equal(other.actions, garden.actions)
    assert bool((other.rewards[:-1] == 0.0).all())
    for n in range(8):
        utility, twin_score = final_gain(other, n)
        assert other.rewards[-1, n].item() == pytest.approx(10.0 * utility, abs=1e-6)
        difference = other.rewards[:, n].sum() - garden.rewards[:, n].sum()
        assert difference.item() == pytest.approx(10.0 * twin_score, abs=1e-6)


def test_every_paired_reward_is_the_change_of_the_gain_over_the_twin(garden) -> None:
    """The price is charged from BLENDING on; the score is the mean of up to three steps."""
    expected = torch.stack([s.report.scores.expected for s in garden.steps])
    twins = torch.stack([s.report.twin_scores.expected for s in garden.steps])
    for n in range(8):
        before = 0.0
        for t in range(3, LENGTH - 1):
            after = garden.steps[t].report.after
            recent = slice(t - 2, t + 1)
            price = price_of(after, n, Stage.BLENDING, Stage.HOLDING, Stage.FOSSILISED)
            gain = (expected[recent, n] - twins[recent, n]).mean().item() - price
            if t > 3:
                found = garden.rewards[t, n].item()
                assert found == pytest.approx(10.0 * (gain - before), abs=1e-9)
            before = gain


@pytest.mark.parametrize("n", [2, 6])
def test_an_unfossilised_seed_does_not_count_at_the_end(garden, n) -> None:
    last = garden.steps[-1].report
    assert last.seed_parameters[n].sum() > 0
    assert last.added_parameters[n] == 0
    slot = 1 if n == 2 else 0
    utility, _ = final_gain(garden, n)
    without = []
    for step in garden.steps[-3:]:
        contribution = step.report.signals.contribution[n, slot].nan_to_num(0.0)
        without.append((step.report.scores.expected[n] - contribution).item())
    assert utility == pytest.approx(sum(without) / 3.0, abs=1e-6)
    assert garden.steps[-2].report.added_parameters[n] > 0


def test_a_fossil_counts_with_all_its_parameters(garden) -> None:
    for step in garden.steps[-3:]:
        report = step.report
        full = report.scores.expected[[1, 3, 5]]
        torch.testing.assert_close(report.committed.expected[[1, 3, 5]], full, rtol=1e-12, atol=0)
        assert bool((report.signals.contribution[[1, 3, 5], 0].abs() > 1e-6).all())
    last = garden.steps[-1].report
    assert torch.equal(last.added_parameters[[1, 3, 5]], last.seed_parameters[[1, 3, 5]].sum(1))


def test_never_growing_has_zero_reward(garden) -> None:
    for n in (0, 4):
        assert bool((garden.rewards[:, n].abs() < 1e-12).all())


def test_a_seed_in_training_does_not_change_the_reward() -> None:
    """Seeds in TRAINING do not affect the host."""
    wishes = {n: [Wish("conv_heavy", slot=n % 2, until=Stage.TRAINING, start=9)] for n in range(4)}
    env = growth_env(4)
    result = grown(wishes, env)
    assert bool((result.stages()[-1] != Stage.DORMANT).any(1).all())
    torch.testing.assert_close(
        result.rewards, torch.zeros_like(result.rewards), rtol=0.0, atol=1e-12
    )


# --- independence -----------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 3, 5, 7])
def test_an_environment_replays_alone(garden, n) -> None:
    env = growth_env(torch.tensor([n]))
    alone = episode(env, lambda observation, t: garden.actions[t, [n]])
    torch.testing.assert_close(alone.losses(1)[..., 0], garden.losses(8)[..., n], rtol=1e-9, atol=0)
    torch.testing.assert_close(alone.rewards[:, 0], garden.rewards[:, n], rtol=1e-9, atol=1e-9)
    assert torch.equal(alone.stages()[:, 0], garden.stages()[:, n])
    for one, many in zip(alone.observations, garden.observations, strict=True):
        for name, tensor in one.tensors().items():
            torch.testing.assert_close(tensor[0], many.tensors()[name][n], rtol=1e-5, atol=1e-6)


def test_the_order_of_environments_does_not_change_results(garden) -> None:
    order = torch.tensor([6, 1, 3, 4])
    env = growth_env(order)
    other = episode(env, lambda observation, t: garden.actions[t, order])
    torch.testing.assert_close(other.losses(4), garden.losses(8)[..., order], rtol=1e-9, atol=0)
    torch.testing.assert_close(other.rewards, garden.rewards[:, order], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("slot", [0, 1])
def test_germinating_in_one_environment_does_not_change_others(slot) -> None:
    """The others wait or grow the same seed."""
    quiet = {7: [Wish("conv_light")]}
    loud = quiet | {3: [Wish("conv_light", slot=slot)], 2: [Wish("norm", slot=1)]}
    with_neighbour, without = grown(loud, growth_env(8)), grown(quiet, growth_env(8))
    others = [0, 1, 4, 5, 6, 7]
    for one, two in (
        (with_neighbour.losses(8), without.losses(8)),
        (with_neighbour.rewards[:, None], without.rewards[:, None]),
    ):
        torch.testing.assert_close(one[..., others], two[..., others], rtol=1e-12, atol=1e-12)
        waiting = [0, 1, 4, 5, 6]
        assert torch.equal(one[..., waiting], two[..., waiting])
    assert bool((with_neighbour.losses(8)[-1, :, 3] != without.losses(8)[-1, :, 3]).all())


def test_the_twin_is_the_environment_of_its_group_that_waits(garden) -> None:
    for step in garden.steps:
        report = step.report
        for waiting, group in ((0, slice(0, 4)), (4, slice(4, 8))):
            own, twins = report.scores.loss[waiting], report.twin_scores.loss[group]
            torch.testing.assert_close(twins, own.expand(4), rtol=1e-12, atol=0.0)
            assert report.twin_score[group].unique().numel() == 1
        score, twin_score = report.score[[0, 4]], report.twin_score[[0, 4]]
        torch.testing.assert_close(score, twin_score, rtol=1e-12, atol=0.0)
        assert report.twin_scores.loss[0] != report.twin_scores.loss[4]


def test_environments_start_equal_within_a_group_and_differ_between_groups(garden) -> None:
    loss = garden.observations[0].host[:, HOST_FEATURES.index("validation_loss")]
    assert loss[:4].unique().numel() == loss[4:].unique().numel() == 1
    assert loss[0] != loss[4]


def test_an_episode_repeats_in_the_same_bits_and_another_differs(garden) -> None:
    env = growth_env(8)
    grown(GARDEN, env, number=3)
    again = grown(GARDEN, env, number=0)
    assert torch.equal(again.losses(8), garden.losses(8))
    assert torch.equal(again.rewards, garden.rewards)
    other = grown(GARDEN, growth_env(8), number=1)
    assert bool((other.losses(8) != garden.losses(8)).all())


# --- actions ----------------------------------------------------------------------------------

ILLEGAL = [
    canonical_action(op=Op.ADVANCE, slot=1), canonical_action(op=Op.FOSSILISE),
    canonical_action(op=Op.PRUNE, slot=1), canonical_action(op=Op.SET_ALPHA_TARGET),
    canonical_action(op=Op.GERMINATE, blueprint=0),
    canonical_action(op=Op.GERMINATE, blueprint=BLUEPRINTS.index("lora")),
    canonical_action(op=Op.GERMINATE, blueprint=1, slot=2), canonical_action(op=Op.WAIT, slot=-1),
    canonical_action(op=9),
]  # fmt: skip


def test_an_illegal_action_has_the_effect_of_wait() -> None:
    def waiting(observation: Observation, t: int) -> Tensor:
        return canonical_action(op=Op.WAIT).repeat(3, 1)

    def wrong(observation: Observation, t: int) -> Tensor:
        actions = waiting(observation, t)
        actions[1] = ILLEGAL[t % len(ILLEGAL)]
        return actions

    lawful, unlawful = episode(growth_env(3), waiting), episode(growth_env(3), wrong)
    assert torch.equal(lawful.losses(3), unlawful.losses(3))
    assert torch.equal(lawful.rewards, unlawful.rewards)
    success = HOST_FEATURES.index("action_success")
    for one, two in zip(lawful.steps, unlawful.steps, strict=True):
        assert one.report.success.tolist() == [True, True, True]
        assert two.report.success.tolist() == [True, False, True]
        for field in fields(SeedState):
            assert torch.equal(
                getattr(one.report.after, field.name), getattr(two.report.after, field.name)
            )
        seen, expected = two.observation.tensors(), one.observation.tensors()
        assert seen["host"][:, success].tolist() == [1.0, 0.0, 1.0]
        seen["host"][:, success] = 1.0
        for name, tensor in expected.items():
            assert torch.equal(seen[name], tensor), name


def test_a_step_after_the_end_of_an_episode_is_an_error(garden) -> None:
    env = growth_env(1, episode_length=1)
    env.reset(0)
    env.step(canonical_action(op=Op.WAIT)[None])
    with pytest.raises(AssertionError, match="over"):
        env.step(canonical_action(op=Op.WAIT)[None])


def test_an_unknown_reward_is_an_error() -> None:
    with pytest.raises(ValueError, match="reward"):
        growth_env(1, reward="praise")


# --- observations -----------------------------------------------------------------------------


def test_observations_are_finite_and_describe_the_step(garden) -> None:
    def feature(t: int, name: str) -> Tensor:
        return garden.observations[t].host[:, HOST_FEATURES.index(name)]

    for t, observation in enumerate(garden.observations):
        for tensor in observation.tensors().values():
            assert bool(tensor.isfinite().all()) or tensor.dtype == torch.bool
        assert feature(t, "progress")[0].item() == pytest.approx(t / LENGTH)
        assert feature(t, "remaining")[0].item() == pytest.approx(1.0 - t / LENGTH)
        if t:
            report, action = garden.steps[t - 1].report, garden.actions[t - 1]
            scores = report.scores
            torch.testing.assert_close(feature(t, "expected_accuracy"), scores.expected[:8].float())
            torch.testing.assert_close(
                feature(t, "validation_loss"), scores.loss[:8].log1p().float()
            )
            torch.testing.assert_close(
                feature(t, "train_accuracy"), report.train_accuracy[:8].float()
            )
            torch.testing.assert_close(
                feature(t, "log_growth"),
                (report.seed_parameters.sum(1) / HOST_PARAMETERS).log1p().float(),
            )
            assert torch.equal(observation.blueprints, report.after.blueprint)
            for op in Op:
                shown = feature(t, f"last_{op.name.lower()}")
                assert torch.equal(shown == 1.0, action[:, 0] == op)
            critic = observation.critic
            torch.testing.assert_close(critic[:4, 0], critic[:1, 0].expand(4))
            assert bool((critic[[0, 4], 1].abs() < 1e-6).all())
            assert bool((critic[:, 2] == 1.0).all())


def test_masks_allow_what_the_lifecycle_allows(garden) -> None:
    for observation in garden.observations:
        legal = observation.masks.slots
        assert bool(legal[:, Op.WAIT].all())
        assert not bool(observation.masks.kinds[..., 0].any())
    start = garden.observations[0].masks.slots
    assert bool(start[:, Op.GERMINATE].all())
    closed = [Op.SET_ALPHA_TARGET, Op.PRUNE, Op.FOSSILISE, Op.ADVANCE]
    assert not bool(start[:, closed].any())


# --- one tensor program -----------------------------------------------------------------------


def dispatched(count: int, gardeners: range, steps: int = 11, backend: str = "torch") -> list[int]:
    """Operations of each step while ``gardeners`` grow the same seed in lockstep."""
    env = growth_env(count, dtype=torch.float32, episode_length=11, backend=backend)
    wishes = {n: [Wish("conv_light", slot=1)] for n in gardeners}
    rows = list(gardeners)
    observation, counts = env.reset(0), []
    for t in range(steps):
        actions = wished_actions(wishes, env.environments, observation, t)
        if rows and actions[rows, 0].unique().numel() > 1:  # not every seed is ready
            actions[rows] = canonical_action(op=Op.WAIT)
        with OperationCounter() as counter:
            step = env.step(actions)
        counts.append(counter.dispatched)
        observation = step.observation
    if rows and steps == 11:
        assert step.report.after.stage[rows, 1].unique().tolist() == [Stage.FOSSILISED]
    return counts


def test_operations_of_a_step_do_not_depend_on_the_number_of_environments() -> None:
    dispatched(1, range(1))  # tables are created on first use
    nobody, one = range(0), range(1)
    assert dispatched(4, nobody) == dispatched(64, nobody)
    alone = dispatched(4, one)
    assert alone == dispatched(64, one)
    assert len(set(alone)) > 2  # the seed takes operations at all


@needs_native
def test_operations_of_a_step_do_not_depend_on_environments_with_the_native_backend() -> None:
    """Nor on the number of seeds: the native backend does not split seeds into chunks."""
    dispatched(4, range(4), backend="native")
    all_of_four, all_of_many = (dispatched(n, range(n), backend="native") for n in (4, 64))
    assert all_of_four == all_of_many
    one_of_four, one_of_many = (dispatched(n, range(1), backend="native") for n in (4, 64))
    assert one_of_four == one_of_many


def test_operations_of_a_step_grow_linearly_with_the_chunks_of_seeds() -> None:
    dispatched(1, range(1))
    counts = [dispatched(n, range(n), steps=6) for n in (4, CHUNK, 2 * CHUNK, 3 * CHUNK, 4 * CHUNK)]
    few, one, two, three, four = (torch.tensor(count) for count in counts)
    assert torch.equal(few, one)
    assert torch.equal(three - two, four - three)
    assert int((two - one).max()) > 0
