"""The ladder, the rungs of a policy and the variants of try-and-keep."""

import random
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
from esper.tamiyo.try_and_keep import MARGIN
from esper_lab import baselines, controls, ladder, rules
from esper_lab.baselines import FINE_TUNING
from esper_lab.controls import TRIALS, TrialPlan
from esper_lab.evaluation import Evaluation, Rung
from esper_lab.hosts import FRESH_HOSTS
from esper_lab.ladder import evaluate, policy_rungs
from esper_lab.plans import NEVER, library
from esper_lab.play import Hosts, Outcome, Population, Rules, Stages, load_or_make, play
from esper_lab.small_copies import CHANGES
from esper_lab.without_looking import Recording, misled_twin, record, yoked_copy
from tiny_population import LARGE, hosts, looking, trained_run

PLANS = NEVER, next(plan for plan in library() if plan.at_once and plan.seeds[0].size > 0.0), LARGE
HOSTS = Hosts(hosts(20), hosts(6, first=FRESH_HOSTS))
Calls = list[tuple[str, int, int]]


@pytest.fixture(autouse=True)
def small_library(monkeypatch) -> None:
    monkeypatch.setattr(ladder, "library", lambda random=0: PLANS)
    monkeypatch.setattr(baselines, "FACTORS", {})
    monkeypatch.setattr(controls, "TRIALS", controls.TRIALS[8::8])
    monkeypatch.setattr(rules, "TREES", 10)


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("work") / "stages"


def evaluated(policy: str, work: Path, calls: Calls | None = None) -> Evaluation:
    told: Calls = [] if calls is None else calls
    return evaluate(policy, "tiny", [HOSTS], 2, work, lambda *batch: told.append(batch))


def test_the_rungs_stand_in_order_and_never_is_never(work: Path):
    calls: Calls = []
    found = evaluated("never", work, calls)
    assert [rung.name for rung in found.rungs] == [
        "never grow", "everything at step 0", "adapters everywhere", *FINE_TUNING,
        "last-layer tuning of a copy", *(f"{name} of a copy" for name in CHANGES),
        "full tuning of a copy", "best copy or none", *rules.RULES, "try and keep",
        "clairvoyant per host", "policy, never",
    ]  # fmt: skip
    rungs = {rung.name: rung for rung in found.rungs}
    never, policy = rungs["never grow"], rungs["policy, never"]
    assert policy.utility == pytest.approx(never.utility, abs=1e-6)
    assert policy.validation == pytest.approx(never.validation, abs=1e-6)
    assert [rung.name for rung in found.rungs if rung.policy] == ["policy, never"]
    assert never.added == [0.0] * 6
    assert rungs["everything at step 0"].chosen == [1] * 6
    assert rungs["clairvoyant per host"].chosen == [0, 2] * 3
    assert np.mean(rungs["clairvoyant per host"].utility) > np.mean(never.utility) + 0.1
    assert rungs["try and keep"].chosen is None
    assert found.tasks == ["tiny"] * 6
    assert (found.training_hosts, found.plans[0]) == (20, "never")
    # Three plans and every variant of try-and-keep on each training host.
    assert found.rule_episodes == 20 * (3 + 2 * len(controls.TRIALS))
    assert found.policy_episodes == 0
    for stage in dict.fromkeys(stage for stage, _, _ in calls):
        assert {total for s, _, total in calls if s == stage} == {
            sum(done for s, done, _ in calls if s == stage)
        }


def test_trials_are_played_in_turn_and_at_once(tmp_path: Path, monkeypatch):
    given = []

    def spy(population: Population, actor, members: int, rules: Rules, done) -> Outcome:
        given.append(rules)
        return play(population, actor, members, rules, done)

    monkeypatch.setattr(controls, "play", spy)
    found = controls._of_trials(Stages(tmp_path, lambda *batch: None), "trials", HOSTS.fresh)
    assert [rules.one_at_a_time for rules in given] == [True, False]
    in_turn, at_once = np.split(found.test_utility, 2, axis=1)
    assert in_turn.shape == (6, len(controls.TRIALS))
    assert not np.array_equal(in_turn, at_once)


def test_finished_stages_are_not_repeated(work: Path):
    first, calls = evaluated("rule", work), []
    again = evaluated("rule", work, calls)
    assert calls == []
    assert again == first
    assert again.policy_episodes is None
    assert not [rung for rung in again.rungs if rung.policy]


def test_another_suite_does_not_take_the_stages_of_this_one(work: Path):
    evaluated("rule", work)
    before = {path.name for path in work.iterdir()}
    other = Hosts(hosts(20), hosts(6, first=7))
    evaluate("rule", "tiny", [other], 2, work)
    assert before < {path.name for path in work.iterdir()}


def test_interrupted_work_continues(work: Path, tmp_path: Path):
    whole = evaluated("heuristic", work)

    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == "again":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate("heuristic", "tiny", [HOSTS], 2, tmp_path, interrupt)
    assert len(list(tmp_path.iterdir())) == 2
    calls: Calls = []
    assert evaluated("heuristic", tmp_path, calls) == whole
    assert {stage for stage, _, _ in calls} & {"tuning", "fresh"} == set()


def outcome() -> Outcome:
    draws = np.random.default_rng(0)
    tables = [draws.normal(size=(2, 3)) for _ in range(6)]
    return Outcome(*tables, features=draws.normal(size=(2, 4, 5)))


def test_an_outcome_is_made_once_and_read_as_it_was(tmp_path: Path):
    made = []

    def make() -> Outcome:
        made.append(1)
        return outcome()

    first, again = (load_or_make(tmp_path / "deep" / "stage.npz", make) for _ in range(2))
    assert made == [1]
    for name in Outcome.__slots__:
        np.testing.assert_array_equal(getattr(first, name), getattr(again, name))
        np.testing.assert_allclose(getattr(first, name), getattr(outcome(), name), atol=1e-6)


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 cut off"])
def test_a_broken_stage_is_a_usage_error(tmp_path: Path, content: bytes):
    path = tmp_path / "stage.npz"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"^work: cannot read .*stage.npz .*; remove the file$"):
        load_or_make(path, outcome)


def test_a_fixed_split_has_no_seed(work: Path):
    assert set(evaluated("rule", work).splits) == {None}


def test_a_damaged_stage_is_a_usage_error(tmp_path: Path):
    path, draw = tmp_path / "stage.npz", random.Random(37)
    load_or_make(path, outcome)
    whole = path.read_bytes()
    for _ in range(200):
        flipped = bytearray(whole)
        flipped[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        path.write_bytes(flipped)
        with pytest.raises(
            UsageError, match=r"^work: cannot read .*stage.npz .*; remove the file$"
        ):
            load_or_make(path, outcome)


FRESH = hosts(6, first=FRESH_HOSTS)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    return trained_run(folder, rounds=2, strict_gates=True, checkpoint_every=1)


def rungs_of(grower: GrowingPolicy, work: Path, calls: Calls | None = None) -> list[Rung]:
    told: Calls = [] if calls is None else calls
    return policy_rungs(grower, FRESH, 2, Stages(work, lambda *batch: told.append(batch)))


def test_a_learned_policy_stands_with_its_misled_twin_and_yoked_copy(run: Path, work: Path):
    calls: Calls = []
    grower = GrowingPolicy.named(str(run))
    assert (grower.learned, grower.episodes) == (True, 2 * 4)
    rungs = rungs_of(grower, work, calls)
    assert [(rung.name, rung.policy) for rung in rungs] == [
        (f"{kind}, {way}", kind == "policy")
        for way in ("greedy", "sampled")
        for kind in ("policy", "misled twin", "yoked copy")
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
        "misled twin": misled_twin(looking),
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
    parts = [outcome.members(slice(0, 2)), outcome.members(slice(2, 5))]
    again = Outcome.join(parts, axis=1)
    for name in Outcome.__slots__:
        np.testing.assert_array_equal(getattr(again, name), getattr(outcome, name))


def test_a_policy_without_a_checkpoint_is_refused_before_anything_is_played(
    run: Path, tmp_path: Path
):
    copy = shutil.copytree(run, tmp_path / "copy")
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(UsageError, match=r"^policy: "):
        evaluate(str(copy), "tiny", [Hosts(hosts(20), FRESH)], 2, tmp_path / "work")
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("length", [12, 24, 150])
@pytest.mark.parametrize("slots", [1, 3, 8])
def test_every_slot_is_decided_before_the_end(length: int, slots: int):
    for plan in TRIALS:
        assert 1 <= plan.decision_step(length, slots) <= length - slots - MARGIN


def test_the_decision_is_half_way_or_as_late_as_the_slots_allow():
    half, late = (TrialPlan(1 / 3, 0.0, 1, decision) for decision in (0.5, 1.0))
    assert half.decision_step(150, 3) == 75
    assert late.decision_step(150, 3) == 145
    assert half.decision_step(12, 8) == late.decision_step(12, 8) == 2
    assert {plan.decision for plan in TRIALS} == {0.5, 1.0}
