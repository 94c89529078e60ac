"""What is read from records is what was collected, from any mixture of runs."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import duckdb
import pyarrow.parquet
import pytest
import torch

from esper.karn.store import read_events
from esper.leyline.actions import Op
from esper.leyline.config import unflatten
from esper.leyline.errors import UsageError
from esper.leyline.events import DecisionsMade, EpochCompleted
from esper.leyline.records import record_files, record_schema
from esper.simic.records.episodes import Episodes, RecordReader, join_episodes, read_episodes
from esper.simic.records.record_columns import RoundRecord, current_layout
from esper.simic.rollout import Rollout
from esper.simic.training.growth_trainee import GrowthTrainee
from esper.simic.training.vectorized import RunSummary, run_training
from small_runs import SMALL

TASKS = ["digits_shift", "digits_deep"]  # hosts with 2 and with 3 slots
Train = Callable[..., tuple[RunSummary, list[Rollout]]]


@pytest.fixture(scope="module")
def train(tmp_path_factory) -> Train:
    """Trains and records; returns the run and the rollout of each round as it was collected."""

    def run(policy: str = "ppo", **settings: object) -> tuple[RunSummary, list[Rollout]]:
        rollouts: list[Rollout] = []
        with pytest.MonkeyPatch.context() as patch:

            def collect(self, *arguments, own=GrowthTrainee.collect) -> Rollout:
                rollouts.append(own(self, *arguments))
                return rollouts[-1]

            patch.setattr(GrowthTrainee, "collect", collect)
            place = {"telemetry_dir": str(tmp_path_factory.mktemp("runs")), "record": True}
            return run_training(unflatten(SMALL | place | settings), policy), rollouts

    return run


@pytest.fixture(scope="module")
def mixed(train: Train) -> tuple[RunSummary, list[Rollout]]:
    """A run of two tasks with different numbers of slots, whose policy tries many things."""
    more = {"task": TASKS, "envs": 6, "rounds": 3, "entropy": 2.0, "learning_rate": 0.02}
    return train(**more, target_kl=1.0, episode_length=8, telemetry_level="normal")


def part(x: torch.Tensor, number: int, count: int) -> torch.Tensor:
    """The episodes of round ``number``, from 0."""
    return x[:, number * count : (number + 1) * count]


def test_episodes_equal_the_rollouts(mixed) -> None:
    run, rollouts = mixed
    episodes = read_episodes([run.path])
    assert {rollout.observation.slots.shape[2] for rollout in rollouts} == {3}
    assert len({op for rollout in rollouts for op in rollout.actions[..., 0].unique().tolist()}) > 2
    for i, rollout in enumerate(rollouts):
        found = {name: part(x, i, 6) for name, x in episodes.observation.tensors().items()}
        for name, expected in rollout.observation.tensors().items():
            assert found[name].dtype == expected.dtype
            assert torch.equal(found[name], expected), name
        for name in ("actions", "log_prob", "rewards", "terminated", "truncated"):
            assert torch.equal(part(getattr(episodes, name), i, 6), getattr(rollout, name)), name
    assert episodes.terminated.sum(0).tolist() == [1] * 18
    assert bool(episodes.terminated[-1].all())
    assert episodes.rounds.tolist() == [r for r in (1, 2, 3) for _ in range(6)]
    assert episodes.environments.tolist() == list(range(6)) * 3
    assert episodes.twins.tolist() == [0, 0, 1, 1, 2, 2] * 3
    assert set(episodes.tasks) == set(TASKS)
    assert episodes.policies == ["ppo"] * 18
    assert bool(episodes.valid.all())


def test_records_agree_with_the_events_of_the_run(mixed) -> None:
    """The log-probs of events are rounded to five decimals."""
    run, _ = mixed
    episodes = read_episodes([run.path])
    steps = list(read_events(run.path, EpochCompleted))
    for event, decision in zip(steps, read_events(run.path, DecisionsMade), strict=True):
        at = event.step - 1
        assert part(episodes.actions, event.round - 1, 6)[at].tolist() == decision.actions
        log_prob = part(episodes.log_prob, event.round - 1, 6)[at]
        assert log_prob.tolist() == pytest.approx(decision.log_prob, abs=1e-5)
        rewards = part(episodes.rewards, event.round - 1, 6)[at]
        assert rewards.tolist() == pytest.approx(event.reward, abs=1e-6)


def test_values_are_in_units_of_reward(train: Train, monkeypatch) -> None:
    seen = []

    def watched(self, number: int, rollout: Rollout, own=GrowthTrainee.record) -> RoundRecord:
        moments = self.agent.return_moments
        deviation = 1.0 if moments.count == 0 else (moments.squares / moments.count + 1e-4).sqrt()
        seen.append(rollout.values * deviation + moments.mean)
        return own(self, number, rollout)

    monkeypatch.setattr(GrowthTrainee, "record", watched)
    run, rollouts = train(rounds=2, reward="utility")
    values = read_episodes([run.path]).values
    assert values.flatten().tolist() == pytest.approx(
        torch.cat(seen, 1).flatten().tolist(), rel=1e-5, abs=1e-6
    )
    assert not torch.allclose(part(values, 1, 4), rollouts[1].values)


def test_the_policy_that_acted_gives_the_recorded_log_probs(train: Train, monkeypatch) -> None:
    """Observations, masks and actions suffice to evaluate a policy, whatever pads its hosts."""
    acted = []

    def watched(self, number: int, rollout: Rollout, own=GrowthTrainee.record) -> RoundRecord:
        if self.agent is not None:
            acted.append(copy.deepcopy((self.agent.policy, self.agent.moments)))
        return own(self, number, rollout)

    monkeypatch.setattr(GrowthTrainee, "record", watched)
    more = {"entropy": 2.0, "learning_rate": 0.02, "target_kl": 1.0}
    run, _ = train(task=["digits_shift"], rounds=4, episode_length=8, **more)
    wide, _ = train("random", task=["digits_deep"], rounds=1, episode_length=10)
    episodes = read_episodes([run.path, wide.path])
    assert episodes.observation.slots.shape == (10, 20, 3, len(current_layout().slots))
    for i, (policy, moments) in enumerate(acted):
        with torch.no_grad():
            evaluation = policy.evaluate_actions(
                moments.normalise(episodes.observation), episodes.actions, policy.initial_hidden(20)
            )
        found, expected = (part(x, i, 4)[:8] for x in (evaluation.log_prob, episodes.log_prob))
        assert torch.allclose(found, expected, atol=1e-5)
    assert len(part(episodes.actions, 3, 4)[:8].flatten(0, 1).unique(dim=0)) > 5


def test_runs_of_other_lengths_slots_and_backends_are_padded(train: Train) -> None:
    native, _ = train("random", task=["digits_shift"], rounds=1, backend="native")
    torch_, rollouts = train(
        "random", task=["digits_deep"], rounds=1, backend="torch", episode_length=5
    )
    episodes = read_episodes([native.path, torch_.path])
    assert episodes.lengths.tolist() == [3] * 4 + [5] * 4
    assert episodes.runs == [native.path] * 4 + [torch_.path] * 4
    assert episodes.valid.int().sum(0).tolist() == [3] * 4 + [5] * 4
    own, masks = episodes.observation, episodes.observation.masks
    assert not bool(masks.slots[:, :4, :, 2].any())
    assert masks.exists[:, :4].tolist() == [[[True, True, False]] * 4] * 5
    assert bool((own.slots[:, :4, 2] == 0.0).all())
    assert bool(masks.ops.any(-1).all()), "also the steps that pad an episode have a legal op"
    assert bool((episodes.rewards[3:, :4] == 0.0).all())
    assert not bool(episodes.terminated[3:, :4].any())
    assert torch.equal(own.slots[:, 4:], rollouts[0].observation.slots)
    assert torch.equal(episodes.actions[3:, :4], episodes.actions[:1, :4].expand(2, -1, -1))


def test_the_padding_of_an_episode_earns_and_ends_nothing(train: Train) -> None:
    short, long = (
        next(iter(RecordReader([train("random", rounds=1, episode_length=steps)[0].path])))
        for steps in (3, 5)
    )
    ones = torch.ones_like(short.rewards)
    short = replace(short, rewards=ones, terminated=ones.bool(), truncated=ones.bool())
    joined = join_episodes([short, long])
    for name in ("rewards", "terminated", "truncated"):
        assert getattr(joined, name)[:, 0].tolist() == [1, 1, 1, 0, 0]
    assert torch.equal(joined.rewards[:, 4:], long.rewards)
    assert joined.lengths.tolist() == [3] * 4 + [5] * 4


def test_twin_scores_are_those_of_the_twins(train: Train) -> None:
    """Mean of the last three expected accuracies; on the last step fossilised seeds alone act."""
    run, _ = train("random", rounds=1, episode_length=16, max_batches=4, telemetry_level="normal")
    found = read_episodes([run.path]).twin_scores
    steps = [event.twin_expected_accuracy for event in read_events(run.path, EpochCompleted)]
    own = [event.expected_accuracy for event in read_events(run.path, EpochCompleted)]
    assert steps != own
    for t in range(2, 15):
        means = [sum(values) / 3 for values in zip(*steps[t - 2 : t + 1], strict=True)]
        assert found[t].tolist() == pytest.approx(means, abs=1e-6)


def test_a_draw_of_a_family_has_both_names(train: Train) -> None:
    run, _ = train("never", task=["from_scratch:1", "from_scratch:2"], rounds=1)
    episodes = read_episodes([run.path])
    assert set(episodes.tasks) == {"from_scratch"}
    assert set(episodes.draws) <= {"from_scratch:1", "from_scratch:2"}


def test_one_round_at_a_time_gives_the_same_as_all_together(mixed) -> None:
    run, _ = mixed
    reader = RecordReader([run.path])
    assert len(reader) == 3
    parts = list(reader)
    assert [part.count for part in parts] == [6] * 3

    def actions(episodes: Episodes) -> list:
        return episodes.actions.tolist()

    assert actions(join_episodes(parts)) == actions(read_episodes([run.path]))
    assert actions(next(iter(reader))) == actions(parts[0])


@pytest.mark.parametrize("policy", ["heuristic", "never", "random", "schedule"])
def test_policies_that_do_not_learn_are_recorded_without_values(train: Train, policy: str) -> None:
    run, rollouts = train(policy, rounds=2, episode_length=12)
    episodes = read_episodes([run.path])
    assert episodes.policies == [policy] * 8
    assert bool(episodes.values.isnan().all())
    assert torch.equal(part(episodes.actions, 1, 4), rollouts[1].actions)
    ops = set(episodes.actions[..., 0].flatten().tolist())
    assert (ops == {Op.WAIT}) == (policy == "never")
    certain = episodes.log_prob == 0.0
    assert bool(certain.all()) == (policy != "random")


def test_other_tools_read_the_files(mixed) -> None:
    run, rollouts = mixed
    pattern = str(run.path / "records" / "*.parquet")
    ((rows, total, count),) = duckdb.sql(
        f"SELECT count(*), sum(reward), count(DISTINCT task) FROM '{pattern}'"
    ).fetchall()
    assert rows == 3 * 6 * 8
    assert total == pytest.approx(sum(float(r.rewards.double().sum()) for r in rollouts))
    assert count == 2
    table = pyarrow.parquet.read_table(record_files(run.path)[0])
    assert table.schema.remove_metadata() == record_schema(current_layout())
    assert [len(row) for row in table["slots"].to_pylist()] == [
        2 if task == "digits_shift" else 3 for task in table["task"].to_pylist()
    ]


def test_recording_changes_nothing_that_is_computed(train: Train) -> None:
    recorded, with_records = train(rounds=2)
    plain, without = train(rounds=2, record=False)
    assert not (plain.path / "records").exists()
    for a, b in zip(with_records, without, strict=True):
        assert torch.equal(a.log_prob, b.log_prob)
    metrics = [[r.metrics for r in run.rounds] for run in (recorded, plain)]
    assert metrics[0] == metrics[1]


def test_a_run_without_records_is_refused(train: Train) -> None:
    plain, _ = train(rounds=1, record=False)
    with pytest.raises(UsageError) as error:
        RecordReader([plain.path])
    expected = f"records: {plain.path} has no records; train a run with --record"
    assert str(error.value) == expected
    with pytest.raises(UsageError, match=r"^records: nowhere is not a run directory; esper runs"):
        RecordReader([Path("nowhere")])
