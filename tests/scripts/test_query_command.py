"""``esper query`` as a user types it."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from esper.karn.queries import Store
from esper.karn.views import VIEWS
from esper.scripts.entry import run_guarded
from esper.scripts.main import esper

RUN = str(Path(__file__).parents[1] / "recorded" / "anomalous")
SQL = (
    "SELECT round, head_grad_norms_tempo AS missing, head_grad_norms_style AS bad, [1, 2] AS list "
    "FROM updates WHERE round >= 4 ORDER BY round"
)


def run(*arguments: str) -> int:
    return run_guarded(esper, ["query", *arguments])


def test_a_table_distinguishes_missing_from_nan(capsys) -> None:
    assert run(RUN, SQL) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│ ")]
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    assert [row[0] for row in cells] == ["4", "5", "6"]
    assert cells[1] == ["5", "", "NaN", "1 2"]
    # Numbers are aligned on the right, texts on the left.
    assert run(RUN, "SELECT 1 AS a_number, 'x' AS some_text") == 0
    row = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("│ "))
    assert row == "│        1 │ x         │"


@pytest.mark.parametrize(("rows", "line"), [(1000, ""), (1003, "3 more rows; --format csv ")])
def test_a_table_says_how_many_rows_it_leaves_out(rows: int, line: str, capsys) -> None:
    assert run(RUN, f"SELECT * FROM range({rows})") == 0
    printed = capsys.readouterr()
    assert len([row for row in printed.out.splitlines() if row.startswith("│ ")]) == 1000
    assert line in printed.err
    assert bool(printed.err) == bool(line)


def test_a_row_that_is_wider_than_the_terminal_is_a_record(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    everything = "SELECT * FROM updates ORDER BY round"
    assert run(RUN, everything) == 0
    shown = capsys.readouterr().out.splitlines()
    assert max(map(len, shown)) <= 80
    assert run(RUN, everything, "--format", "json") == 0
    rows = json.loads(capsys.readouterr().out)
    begins = [i for i, line in enumerate(shown) if line.startswith("── row ")]
    assert len(begins) == len(rows) == 6
    for begin, row in zip(begins, rows, strict=True):
        lines = [line.split() for line in shown[begin + 1 : begin + 1 + len(row)]]
        assert [line[0] for line in lines] == list(row)
        (entropy,) = (line[1] for line in lines if line[0] == "entropy")
        assert float(entropy) == pytest.approx(row["entropy"], rel=1e-5)
    monkeypatch.setenv("COLUMNS", "9000")
    assert run(RUN, everything) == 0
    assert "row 1" not in capsys.readouterr().out


def test_csv_and_json_distinguish_missing_from_nan(capsys) -> None:
    assert run(RUN, SQL, "--format", "csv") == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert rows[1] == {"round": "5", "missing": "", "bad": "NaN", "list": "[1, 2]"}
    assert run(RUN, SQL, "--format=json") == 0
    parsed = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert parsed[1] == {"round": 5, "missing": None, "bad": "NaN", "list": [1, 2]}


@pytest.mark.parametrize("form", ["table", "csv", "json"])
def test_a_file_holds_what_the_terminal_would_show(tmp_path, capsys, form: str) -> None:
    target = tmp_path / "out"
    assert run("--format", form, RUN, SQL, "-o", str(target)) == 0
    assert capsys.readouterr().out == ""
    assert run("--format", form, RUN, SQL) == 0
    shown, written = capsys.readouterr().out, target.read_text()
    assert written == shown or form == "table"
    assert "NaN" in written


def test_parquet_keeps_types(tmp_path: Path) -> None:
    target = tmp_path / "out.parquet"
    assert run(RUN, SQL, "--format", "parquet", "--output", str(target)) == 0
    table = pyarrow.parquet.read_table(target)
    assert table["missing"].null_count == 2
    assert table["bad"].null_count == 0
    assert [str(field.type) for field in table.schema][:3] == ["int64", "double", "double"]


def test_an_interrupted_query_ends_as_any_interrupted_command(monkeypatch, capsys) -> None:
    class Interrupted:
        def extract_statements(self, sql: str) -> None:
            raise RuntimeError("Query interrupted")

        def close(self) -> None:
            pass

    def opened(store: Store) -> list[dict[str, Any]]:
        store._database = Interrupted()
        return []

    monkeypatch.setattr(Store, "_open", opened)
    assert run(RUN, SQL) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_help_lists_views_and_columns(capsys) -> None:
    assert run("--help") == 0
    out = capsys.readouterr().out
    for view in VIEWS:
        assert f"\n  {view}\n" in out
    for column in ("head_grad_norms_op", "return_so_far", "slot_name", "amp_scale", "legal_ops"):
        assert f"    {column} " in out
    assert "  epoch_completed" in out
