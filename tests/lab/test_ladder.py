"""The ladder: its rungs on a tiny population, and stages that are kept."""

import random
from pathlib import Path

import numpy as np
import pytest

from esper.leyline.errors import UsageError
from esper_lab import baselines, controls, ladder, rules
from esper_lab.baselines import FINE_TUNING
from esper_lab.evaluation import Evaluation
from esper_lab.hosts import FRESH_HOSTS
from esper_lab.ladder import evaluate
from esper_lab.plans import NEVER, library
from esper_lab.play import Hosts, Outcome, Population, Rules, Stages, load_or_make, play
from tiny_population import LARGE, hosts

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
    return evaluate(policy, "tiny", [HOSTS], 0, 2, work, lambda *batch: told.append(batch))


def test_the_rungs_stand_in_order_and_never_is_never(work: Path):
    calls: Calls = []
    found = evaluated("never", work, calls)
    assert [rung.name for rung in found.rungs] == [
        "never grow",
        "everything at step 0",
        "adapters everywhere",
        *FINE_TUNING,
        "full tuning of a copy",
        *rules.RULES,
        "try and keep",
        "clairvoyant per host",
        "policy, never",
    ]
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
    evaluate("rule", "tiny", [other], 0, 2, work)
    assert before < {path.name for path in work.iterdir()}


def test_interrupted_work_continues(work: Path, tmp_path: Path):
    whole = evaluated("heuristic", work)

    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == "again":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate("heuristic", "tiny", [HOSTS], 0, 2, tmp_path, interrupt)
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
