"""The rungs of a policy: as it is played, with its twin and copy, kept by its checkpoint."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from esper.leyline.errors import UsageError
from esper.simic.growth.environment import GrowthEnv
from esper.simic.run.checkpoint import load_checkpoint
from esper.simic.tools.grow import GrowingPolicy
from esper.tamiyo.baselines import Actor
from esper_lab.evaluation import Rung
from esper_lab.hosts import FRESH_HOSTS
from esper_lab.ladder import evaluate, policy_rungs
from esper_lab.play import Hosts, Outcome, Stages, play
from esper_lab.without_looking import Recording, blind_twin, record, yoked_copy
from tiny_population import hosts, looking, trained_run

FRESH = hosts(6, first=FRESH_HOSTS)
Calls = list[tuple[str, int, int]]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    return trained_run(folder, rounds=2, strict_gates=True, checkpoint_every=1)


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("work") / "stages"


def rungs_of(grower: GrowingPolicy, work: Path, calls: Calls | None = None) -> list[Rung]:
    told: Calls = [] if calls is None else calls
    return policy_rungs(grower, FRESH, 2, Stages(work, lambda *batch: told.append(batch)))


def test_a_learned_policy_stands_with_its_blind_twin_and_yoked_copy(run: Path, work: Path):
    calls: Calls = []
    grower = GrowingPolicy.named(str(run))
    assert (grower.learned, grower.episodes) == (True, 2 * 4)
    rungs = rungs_of(grower, work, calls)
    assert [(rung.name, rung.policy) for rung in rungs] == [
        (f"{kind}, {way}", kind == "policy")
        for way in ("greedy", "sampled")
        for kind in ("policy", "blind twin", "yoked copy")
    ]
    for stage in {stage for stage, _, _ in calls}:
        totals = {total for s, _, total in calls if s == stage}
        assert totals == {sum(done for s, done, _ in calls if s == stage)}
    assert sum(done for _, done, _ in calls) == 6 * 3 * (1 + 2)


def test_each_rung_is_what_its_player_scores(run: Path, tmp_path: Path, monkeypatch):
    """A policy that looks is planted, so that it differs from its twin and its copy."""
    monkeypatch.setattr(GrowingPolicy, "actor", lambda self, env, greedy: looking(env))
    grower = GrowingPolicy.named(str(run))
    world = replace(grower.settings.world, strict_gates=False)
    grower = replace(grower, settings=replace(grower.settings, world=world))
    rungs = {rung.name: rung for rung in rungs_of(grower, tmp_path)}
    recordings: list[Recording] = []
    players: dict[str, Callable[[GrowthEnv], Actor]] = {
        "policy": record(looking, recordings),
        "blind twin": blind_twin(looking),
        "yoked copy": yoked_copy(recordings),
    }
    means = []
    for name, made in players.items():
        outcome, rung = play(FRESH, made, 2), rungs[f"{name}, sampled"]
        for column, values in (
            (rung.utility, outcome.test_utility),
            (rung.validation, outcome.validation_utility),
            (rung.added, outcome.added),
        ):
            np.testing.assert_allclose(column, values.mean(1), atol=1e-6)
        means.append(np.mean(rung.utility))
    assert means[0] > max(means[1:]) + 0.1


def test_finished_stages_are_not_played_again(run: Path, work: Path):
    grower = GrowingPolicy.named(str(run))
    first, calls = rungs_of(grower, work), []
    assert rungs_of(grower, work, calls) == first
    assert calls == []


def test_another_checkpoint_or_another_rule_is_played_anew(run: Path, work: Path):
    grower = GrowingPolicy.named(str(run))
    rungs_of(grower, work)
    earlier = load_checkpoint(run / "checkpoints" / "000001")
    world = replace(grower.settings.world, strict_gates=False)
    others = (
        replace(grower, checkpoint=earlier),
        replace(grower, settings=replace(grower.settings, world=world)),
    )
    for other in others:
        calls: Calls = []
        rungs_of(other, work, calls)
        assert len({stage for stage, _, _ in calls}) == 4
    # The same checkpoint is the same policy, wherever its run lies.
    calls = []
    rungs_of(replace(grower, name="elsewhere"), work, calls)
    assert calls == []


def test_an_interrupted_evaluation_continues_at_the_stage_it_was_in(
    run: Path, work: Path, tmp_path: Path
):
    grower = GrowingPolicy.named(str(run))
    whole = rungs_of(grower, work)

    def interrupt(stage: str, done: int, total: int) -> None:
        if stage.startswith("sampled"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        policy_rungs(grower, FRESH, 2, Stages(tmp_path, interrupt))
    calls: Calls = []
    assert rungs_of(grower, tmp_path, calls) == whole
    assert {stage.split()[0] for stage, _, _ in calls} == {"sampled"}


def test_a_control_is_kept_too(tmp_path: Path):
    for expected in ([6], []):
        calls: Calls = []
        (rung,) = rungs_of(GrowingPolicy.named("heuristic"), tmp_path, calls)
        assert (rung.name, rung.policy) == ("policy, heuristic", True)
        assert [total for _, _, total in calls] == expected


def test_members_of_an_outcome_keep_their_columns():
    tables = [np.random.default_rng(i).normal(size=(2, 5)) for i in range(6)]
    outcome = Outcome(*tables, features=np.zeros((2, 3, 4)))
    parts = [outcome.members(0, 2), outcome.members(2, 5)]
    again = Outcome.join(parts, axis=1)
    for name in Outcome.__slots__:
        np.testing.assert_array_equal(getattr(again, name), getattr(outcome, name))


def test_a_policy_without_a_checkpoint_is_refused_before_anything_is_played(
    run: Path, tmp_path: Path
):
    copy = shutil.copytree(run, tmp_path / "copy")
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(UsageError, match=r"^policy: "):
        evaluate(str(copy), "tiny", [Hosts(hosts(20), FRESH)], 0, 2, tmp_path / "work")
    assert not (tmp_path / "work").exists()
