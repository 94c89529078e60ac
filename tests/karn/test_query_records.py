"""Queries over records agree with the reader of episodes and with the events of the run."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from esper.karn import query
from esper.karn.queries import RECORD_VIEWS, Store
from esper.leyline.actions import Op
from esper.leyline.config import unflatten
from esper.leyline.errors import UsageError
from esper.leyline.records import record_files
from esper.scripts import query as command
from esper.scripts.entry import run_guarded
from esper.simic.records.episodes import read_episodes
from esper.simic.training.vectorized import run_training
from esper.tamiyo.policy.features import HOST_FEATURES
from small_runs import SMALL

RECORDED = Path(__file__).parents[1] / "recorded"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Three runs: random actions in hosts of 2 and of 3 slots, and one without events."""
    place = tmp_path_factory.mktemp("runs")
    more = {"telemetry_dir": str(place), "record": True, "rounds": 2, "telemetry_level": "normal"}
    for task in ("digits_shift", "digits_deep"):
        run_training(unflatten(SMALL | more | {"task": [task]}), "random")
    silent = SMALL | more | {"telemetry_level": "off", "task": ["digits"], "rounds": 1}
    run_training(unflatten(silent), "heuristic")
    return place


def rows(place: Path, sql: str, **more: bool) -> list[tuple]:
    return [tuple(row.values()) for row in query(place, sql, **more).to_pylist()]


def named(place: Path, task: str) -> Path:
    (run,) = place.glob(f"*-{task}")
    return run


def test_a_view_over_runs_of_all_kinds(place: Path) -> None:
    found = rows(
        place,
        "SELECT task, count(*), min(len(slots)), max(len(slots)), count(value) "
        "FROM records GROUP BY task ORDER BY task",
    )
    steps = 4 * 3
    assert found == [
        ("digits", steps, 2, 2, 0),
        ("digits_deep", 2 * steps, 3, 3, 0),
        ("digits_shift", 2 * steps, 2, 2, 0),
    ]


def test_values_equal_those_of_the_reader(place: Path) -> None:
    run = named(place, "digits_deep")
    episodes = read_episodes([run])
    found = rows(
        run,
        "SELECT round, environment, step, op, actions, reward, log_prob, twin_score, "
        "host[list_position(host_features, 'expected_accuracy')], slots[3][1] "
        "FROM records JOIN record_files USING (run, round) ORDER BY round, environment, step",
    )
    expected = [
        (
            int(episodes.rounds[m]), int(episodes.environments[m]), t + 1,
            Op(int(episodes.actions[t, m, 0])).name, episodes.actions[t, m].tolist(),
            episodes.rewards[t, m].item(), episodes.log_prob[t, m].item(),
            episodes.twin_scores[t, m].item(),
            episodes.observation.host[t, m, HOST_FEATURES.index("expected_accuracy")].item(),
            episodes.observation.slots[t, m, 2, 0].item(),
        )
        for m in range(episodes.count)
        for t in range(3)
    ]  # fmt: skip
    assert found == expected


def test_records_join_the_events_of_their_steps(place: Path) -> None:
    ((count, differing),) = rows(
        named(place, "digits_shift"),
        "SELECT count(*), count(*) FILTER (r.op != d.op OR abs(r.reward - w.reward) > 1e-6 "
        "OR abs(r.log_prob - d.log_prob) > 1e-4) "
        "FROM records r JOIN decisions d USING (run, round, step, environment) "
        "JOIN rewards w USING (run, round, step, environment)",
    )
    assert (count, differing) == (2 * 4 * 3, 0)


def test_files_and_their_layout(place: Path) -> None:
    found = rows(
        place, "SELECT policy, round, episodes, steps, bytes, host_features, path FROM record_files"
    )
    assert sorted(row[:4] for row in found) == [
        ("heuristic", 1, 4, 3),
        *(("random", number, 4, 3) for number in (1, 1, 2, 2)),
    ]
    for *_, size, features, path in found:
        assert Path(path).stat().st_size == size
        assert features == list(HOST_FEATURES)


@pytest.mark.parametrize("view", RECORD_VIEWS)
def test_runs_without_records_have_empty_views_of_the_same_form(place: Path, view: str) -> None:
    def columns(run: Path) -> list[tuple[str, str]]:
        with Store([run]) as store:
            return store.columns()[view]

    assert rows(RECORDED / "healthy", f"SELECT * FROM {view}") == []
    assert columns(RECORDED / "healthy") == columns(place)


@pytest.fixture
def damaged(place: Path, tmp_path: Path) -> Path:
    run = Path(shutil.copytree(named(place, "digits_shift"), tmp_path / "run"))
    path = record_files(run)[0]
    path.write_bytes(path.read_bytes()[:-5])
    return run


def test_damaged_records_are_refused_only_by_queries_that_read_them(damaged: Path) -> None:
    assert rows(damaged, "SELECT count(*) FROM steps") == [(24,)]
    with pytest.raises(UsageError, match=r"round-000001.parquet is damaged \(.*\); --skip-bad"):
        rows(damaged, "SELECT count(*) FROM records")


def test_damaged_records_are_left_out_by_name(damaged: Path, capsys) -> None:
    arguments = [str(damaged), "SELECT count(*) AS n FROM Records", "--format", "csv"]
    assert run_guarded(command.query, [*arguments, "--skip-bad"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == ["n", "12"]
    lines = err.splitlines()
    assert lines[0].startswith(f"warning: skipped {record_files(damaged)[0]} (")
    assert lines[1:] == ["warning: skipped 1 of 2 records, which are damaged"]
    assert run_guarded(command.query, arguments) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_sql_still_reads_no_files(place: Path) -> None:
    path = record_files(named(place, "digits_shift"))[0]
    with Store([place]) as store:
        store.query("SELECT count(*) FROM records")
        with pytest.raises(UsageError, match="SQL: "):
            store.query(f"SELECT * FROM read_parquet('{path}')")


def test_a_name_with_a_quote(place: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(named(place, "digits_shift"), tmp_path / "it's"))
    assert rows(run, "SELECT DISTINCT run FROM records") == [("it's",)]


@pytest.mark.parametrize("same_disk", [True, False])
def test_records_that_a_live_run_removes_are_read_to_the_end(
    place: Path, tmp_path: Path, monkeypatch, same_disk: bool
) -> None:
    run = Path(shutil.copytree(named(place, "digits_shift"), tmp_path / "run"))
    config = json.loads((run / "config.json").read_text())
    config["settings"]["record_last"] = 2
    (run / "config.json").write_text(json.dumps(config))

    def other_disk(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    if not same_disk:
        monkeypatch.setattr(os, "link", other_disk)
    sql = "SELECT run, round, step, reward FROM records ORDER BY ALL"
    expected = rows(run, sql)
    with Store([run]) as store:
        store.query("SELECT count(*) FROM record_files")
        shutil.rmtree(run / "records")
        assert [tuple(row.values()) for row in store.query(sql).to_pylist()] == expected
