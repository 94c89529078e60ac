"""Queries over recorded runs agree with a plain reading of their lines."""

import json
import math
import os
import shutil
from functools import cache
from pathlib import Path

import duckdb
import pyarrow
import pytest

import esper.karn
from esper.karn.queries import Store
from esper.karn.views import VIEWS
from esper.leyline.actions import BLUEPRINTS, HEADS, Op
from esper.leyline.errors import UsageError
from esper.leyline.events import (
    AnomalyDetected,
    EpochCompleted,
    GovernorRollback,
    PPOUpdateCompleted,
    encode,
)

RECORDED = Path(__file__).parents[1] / "recorded"
RUNS = ("healthy", "anomalous", "interrupted", "old_schema")


def lines(run: str, kind: str) -> list[dict]:
    """The events of one kind, by a plain JSON reader."""
    text = (RECORDED / run / "events.jsonl").read_text()
    # The last line of an interrupted run is cut off.
    events = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("}\n")]
    return [event for event in events if event["event_type"] == kind]


@cache
def recorded(run: str) -> Store:
    return Store([RECORDED / run])


def rows(run: Path | str, sql: str) -> list[tuple]:
    """Return the rows of a query; ``run`` is a path or the name of a recorded run."""
    table = recorded(run).query(sql) if isinstance(run, str) else esper.karn.query(run, sql)
    return [tuple(row.values()) for row in table.to_pylist()]


def run_of(tmp_path: Path, *events: object, tail: bytes = b"") -> Path:
    run = tmp_path / "run"
    run.mkdir(exist_ok=True)
    (run / "config.json").write_text("{}")
    (run / "events.jsonl").write_bytes(b"".join(encode(e) + b"\n" for e in events) + tail)
    return run


def update(number: int, **metrics: object) -> PPOUpdateCompleted:
    return PPOUpdateCompleted(time=0.0, round=number, update=number, metrics=metrics)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("view", VIEWS)
def test_every_view_of_every_recorded_run_opens(run: str, view: str) -> None:
    table = recorded(run).query(f"SELECT * FROM {view}")
    assert isinstance(table, pyarrow.Table)
    assert len(table.to_pandas()) == table.num_rows
    assert table.num_rows > 0 or view == "anomalies"


@pytest.mark.parametrize("run", RUNS)
def test_there_is_one_row_per_environment_and_step(run: str) -> None:
    expected = sum(len(e["reward"]) for e in lines(run, "EPOCH_COMPLETED"))
    for view in ("steps", "decisions", "rewards"):
        sql = f"SELECT count(*), count(DISTINCT (round, step, environment)) FROM {view}"
        assert rows(run, sql) == [(expected, expected)], view


@pytest.mark.parametrize("run", RUNS)
def test_steps_agree_with_the_lines(run: str) -> None:
    sql = (
        "SELECT round, step, environment, reward, validation_accuracy, op, slot, success, alphas, "
        "blueprints FROM steps ORDER BY ALL"
    )
    expected = [
        (
            e["round"], e["step"], i, e["reward"][i], e["validation_accuracy"][i],
            Op(e["op"][i]).name, e["slot"][i], e["success"][i], e["alpha"][i],
            [BLUEPRINTS[b] for b in e["blueprint"][i]],
        )
        for e in lines(run, "EPOCH_COMPLETED")
        for i in range(len(e["reward"]))
    ]  # fmt: skip
    assert rows(run, sql) == sorted(expected)


def test_the_task_of_a_row_is_that_of_its_environment_and_round() -> None:
    outcomes = {e["round"]: e["task"] for e in lines("healthy", "EPISODE_OUTCOME")}
    assert len({tuple(tasks) for tasks in outcomes.values()}) > 1
    for view in ("steps", "decisions", "rewards", "seeds", "episodes"):
        for number, environment, task in rows(
            "healthy", f"SELECT DISTINCT round, environment, task FROM {view}"
        ):
            assert task == outcomes[number][environment], view


def test_decisions_show_only_the_heads_that_the_op_uses() -> None:
    told = {(e["round"], e["step"]): e for e in lines("healthy", "DECISIONS_MADE")}
    found = rows(
        "healthy",
        "SELECT round, step, environment, op, slot, blueprint, tempo, alpha_speed, legal_ops, "
        "op_probability, log_prob FROM decisions",
    )
    assert {op for _, _, _, op, *_ in found} == {op.name for op in Op}
    for number, step, i, op, slot, blueprint, tempo, speed, legal, probability, log_prob in found:
        event = told[number, step]
        actions = dict(zip(HEADS, event["actions"][i], strict=True))
        assert op == Op(actions["op"]).name
        assert op in legal
        assert legal == [Op(o).name for o in event["legal_ops"][i]]
        assert probability == event["op_probability"][i][actions["op"]]
        assert log_prob == event["log_prob"][i]
        assert slot == (None if op == "WAIT" else actions["slot"])
        germinates = op == "GERMINATE"
        assert blueprint == (BLUEPRINTS[actions["blueprint"]] if germinates else None)
        assert tempo == ((3, 5, 8)[actions["tempo"]] if germinates else None)
        ramps = op in ("PRUNE", "SET_ALPHA_TARGET")
        assert speed == ((0, 3, 5, 8)[actions["alpha_speed"]] if ramps else None)


def test_decisions_of_an_older_schema_have_its_columns() -> None:
    ops = [Op(op).name for e in lines("old_schema", "EPOCH_COMPLETED") for op in e["op"]]
    found = rows("old_schema", "SELECT op, count(*), count(log_prob) FROM decisions GROUP BY op")
    assert sorted(found) == sorted((op, ops.count(op), 0) for op in set(ops))


def test_rewards_add_up_to_the_return() -> None:
    sql = """
        SELECT r.total, e.episode_return FROM (
            SELECT round, environment, max_by(return_so_far, step) AS total
            FROM rewards GROUP BY ALL
        ) r JOIN episodes e USING (round, environment)"""
    found = rows("anomalous", sql)
    assert len(found) == 24
    for total, told in found:
        assert total == pytest.approx(told, abs=1e-5)


def test_seeds_have_one_row_per_stage_change() -> None:
    changes = lines("healthy", "SEED_STAGE_CHANGED")
    assert rows("healthy", "SELECT count(*) FROM seeds") == [
        (sum(len(e["slot"]) for e in changes),)
    ]
    for event, kind in (
        ("germinated", "SEED_GERMINATED"),
        ("pruned", "SEED_PRUNED"),
        ("fossilised", "SEED_FOSSILIZED"),
    ):
        expected = sorted(
            (e["round"], e["step"], e["environment"][i], e["slot"][i], e["blueprint"][i],
             e.get("parameters", [None] * 99)[i])
            for e in lines("healthy", kind) for i in range(len(e["slot"]))
        )  # fmt: skip
        assert expected, kind
        found = rows(
            "healthy",
            "SELECT round, step, environment, slot, blueprint, parameters FROM seeds "
            f"WHERE event = '{event}' ORDER BY ALL",
        )
        assert found == expected
    slots = {"digits": "r1c1", "digits_shift": "r0c1", "digits_mlp": "r0c1"}
    for task, name in rows("healthy", "SELECT DISTINCT task, slot_name FROM seeds WHERE slot = 1"):
        assert name == slots[task]


def test_missing_values_are_null_and_nan_is_a_number(tmp_path: Path) -> None:
    run = run_of(
        tmp_path,
        update(1, **{"head_grad_norms/op": None, "value_loss": 1.0, "mine/a-b": 2}),
        update(2, **{"head_grad_norms/op": "NaN", "value_loss": "Infinity"}),
        update(3, **{"head_grad_norms/op": 0.5, "value_loss": 3.0}),
    )
    norms = [r[0] for r in rows(run, "SELECT head_grad_norms_op FROM updates ORDER BY round")]
    assert norms[0] is None
    assert math.isnan(norms[1])
    assert norms[2] == 0.5
    assert rows(run, "SELECT max(value_loss), min(value_loss) FROM updates") == [(math.inf, 1.0)]
    counted = "SELECT count(head_grad_norms_op), sum(isnan(head_grad_norms_op)::INT) FROM updates"
    assert rows(run, counted) == [(2, 1)]
    finite = "SELECT avg(head_grad_norms_op) FROM updates WHERE isfinite(head_grad_norms_op)"
    assert rows(run, finite) == [(0.5,)]
    assert rows(run, "SELECT mine_a_b, ratio_min FROM updates WHERE round = 1") == [(2.0, None)]


def test_a_column_of_nan_is_still_numeric(tmp_path: Path) -> None:
    """A reader that infers types from the values would make the column text."""
    run = run_of(tmp_path, update(1, grad_norm="NaN"))
    table = esper.karn.query(run, "SELECT grad_norm, ratio_min FROM updates")
    assert [field.type for field in table.schema] == [pyarrow.float64()] * 2


def test_anomalies_and_rollbacks_share_one_view(tmp_path: Path) -> None:
    run = run_of(
        tmp_path,
        AnomalyDetected(
            time=0.0, round=2, kind="ratio_explosion", message="x", metric="ratio_max",
            value="Infinity", threshold=5.0, amp_enabled=True, amp_dtype="float16", amp_scale=8.0,
        ),
        GovernorRollback(
            time=0.0, round=1, step=4, environment=[3, 5], reason=["COLLAPSE", "RUNAWAY"]
        ),
    )  # fmt: skip
    sql = "SELECT kind, round, step, environment, value, message, amp_scale FROM anomalies"
    assert rows(run, f"{sql} ORDER BY ALL") == [
        ("governor_rollback", 1, 4, 3, None, "COLLAPSE", None),
        ("governor_rollback", 1, 4, 5, None, "RUNAWAY", None),
        ("ratio_explosion", 2, None, None, math.inf, "x", 8.0),
    ]
    told = {(e["kind"], e["metric"]) for e in lines("anomalous", "ANOMALY_DETECTED")}
    assert set(rows("anomalous", "SELECT kind, metric FROM anomalies")) == told


def test_unreadable_lines_are_counted_and_reported_once(tmp_path, capsys) -> None:
    bad = (
        b'not json\n{"event_type":"NOPE"}\n{"event_type":"PPO_UPDATE_COMPLETED"}\n'
        + encode(update(9))[:-1] + b',"new":"\xff"}\n'
    )  # fmt: skip
    run = run_of(tmp_path, update(1), tail=bad + encode(update(2)) + b'\n{"event_type":"PPO_UP')
    assert rows(run, "SELECT count(*) FROM updates") == [(2,)]
    assert capsys.readouterr().err == "warning: skipped 5 unreadable lines\n"
    assert rows(run, "SELECT unreadable FROM runs") == [(5,)]
    assert rows("interrupted", "SELECT unreadable, status FROM runs") == [(1, "interrupted")]
    capsys.readouterr()
    rows(run_of(tmp_path, update(1), tail=b"not json\n"), "SELECT count(*) FROM updates")
    assert capsys.readouterr().err == "warning: skipped 1 unreadable line\n"


def test_a_live_run_is_read_up_to_its_last_complete_line(tmp_path: Path) -> None:
    run = run_of(tmp_path, update(1))
    with (run / "events.jsonl").open("ab") as file:
        file.write(encode(update(2)) + b"\n")
        file.flush()
        assert rows(run, "SELECT max(round) FROM updates") == [(2,)]
        file.write(encode(update(3)) + b"\n")
        file.flush()
        assert rows(run, "SELECT max(round) FROM updates") == [(3,)]


def test_a_directory_of_runs_stands_for_all_of_them() -> None:
    table = esper.karn.query(RECORDED, "SELECT run, status, schema FROM runs ORDER BY run")
    assert table.to_pylist() == [
        {"run": "anomalous", "status": "finished", "schema": 3},
        {"run": "healthy", "status": "finished", "schema": 3},
        {"run": "interrupted", "status": "interrupted", "schema": 3},
        {"run": "old_schema", "status": "finished", "schema": 2},
    ]
    twice = [RECORDED / "healthy", str(RECORDED / "healthy" / ".")]
    assert esper.karn.query(twice, "SELECT * FROM runs").num_rows == 1


def test_a_name_that_is_not_valid_text_is_escaped(tmp_path: Path) -> None:
    place = tmp_path / os.fsdecode(b"run-\xff")
    run_of(tmp_path, update(1)).rename(place)
    assert rows(place, "SELECT run FROM updates") == [("run-\\udcff",)]


def test_runs_with_the_same_name_are_distinguished(tmp_path: Path) -> None:
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        run_of(tmp_path / place, update(1))
    found = rows(tmp_path, "SELECT run, count(*) FROM updates GROUP BY run ORDER BY run")
    assert found == [(str(tmp_path / place / "run"), 1) for place in ("a", "b")]


@pytest.mark.parametrize(
    ("sql", "says"),
    [
        ("SELECT nope FROM updates", "nope"), ("SELEC 1", "syntax error"), ("", "one SELECT"),
        ("SELECT 1; SELECT 2", "one SELECT"), ("DROP VIEW updates", "one SELECT"),
        ("COPY (SELECT 1) TO 'out.csv'", "one SELECT"), ("ATTACH 'x.db'", "one SELECT"),
        ("SET enable_external_access = true", "one SELECT"),
        ("SELECT * FROM read_csv('{file}')", "disabled"),
        ("SELECT * FROM read_text('{file}')", "disabled"), ("SELECT * FROM '{file}'", "disabled"),
        ("SELECT * FROM glob('*')", "disabled"), ("SELECT * FROM frame", "does not exist"),
    ],
)  # fmt: skip
def test_sql_can_read_only_the_views(tmp_path, monkeypatch, sql: str, says: str) -> None:
    monkeypatch.chdir(tmp_path)
    frame = pyarrow.table({"secret": [1]})
    assert frame.num_rows == 1
    (tmp_path / "data.csv").write_text("a\n1\n")
    (tmp_path / "run").mkdir()
    shutil.copy(RECORDED / "interrupted" / "events.jsonl", tmp_path / "run")
    with pytest.raises(UsageError, match=says) as error:
        esper.karn.query(tmp_path / "run", sql.format(file=tmp_path / "data.csv"))
    assert "\n" not in str(error.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data.csv", "run"]


def test_the_database_can_read_the_file_when_external_access_is_allowed(tmp_path: Path) -> None:
    """The queries above are refused by Esper, not because the file is missing."""
    file = tmp_path / "data.csv"
    file.write_text("a\n1\n")
    assert duckdb.sql(f"SELECT * FROM '{file}'").fetchall() == [(1,)]


def test_a_directory_without_runs_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no directory"):
        esper.karn.query(tmp_path / "nope", "SELECT 1")
    with pytest.raises(UsageError, match="no run with events"):
        esper.karn.query(tmp_path, "SELECT 1")


def test_events_are_tables_as_well(tmp_path: Path) -> None:
    event = EpochCompleted(
        time=0.0, round=1, step=1, train_loss=["NaN"], train_accuracy=[0.5],
        validation_loss=[1.0], validation_accuracy=[0.5], expected_accuracy=[0.5],
        twin_validation_accuracy=[0.5], twin_expected_accuracy=[0.5], reward=[0.0],
        added_parameters=[0], op=[0], slot=[0], success=[True], stage=[[1, 0]],
        blueprint=[[0, 0]], alpha=[[0.0, 0.0]],
    )  # fmt: skip
    run = run_of(tmp_path, event)
    assert rows(run, "SELECT stage, isnan(train_loss[1]) FROM epoch_completed") == [
        ([[1, 0]], True)
    ]
    assert rows(run, "SELECT stages FROM steps") == [(["DORMANT", ""],)]
