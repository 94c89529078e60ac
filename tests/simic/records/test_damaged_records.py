"""Records that are cut off, flipped, swapped or of another version are named, never read."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pyarrow
import pyarrow.parquet
import pytest

from esper.leyline import records
from esper.leyline.actions import BLUEPRINTS, HEAD_WIDTHS
from esper.leyline.config import unflatten
from esper.leyline.errors import UsageError
from esper.leyline.records import (
    DamagedRecord,
    Layout,
    RecordHeader,
    record_files,
    record_path,
    run_identity,
    sealed_record,
    verified_record,
)
from esper.simic.records import record_columns
from esper.simic.records.episodes import RecordReader, read_episodes
from esper.simic.records.record_columns import current_layout
from esper.simic.training.vectorized import run_training
from small_runs import SMALL


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    place = {"telemetry_dir": str(tmp_path_factory.mktemp("runs")), "record": True, "rounds": 3}
    return run_training(unflatten(SMALL | place), "random").path


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "run"))


def resealed(path: Path, **changed: object) -> None:
    """Write the record anew with another header."""
    header, _ = verified_record(path, run_identity(path.parents[1]))
    table = pyarrow.parquet.read_table(path)
    path.write_bytes(sealed_record(table, msgspec.structs.replace(header, **changed)))


def reason(path: Path) -> str:
    with pytest.raises(DamagedRecord) as error:
        verified_record(path, run_identity(path.parents[1]))
    return str(error.value)


def test_a_copy_of_a_run_is_intact(run: Path) -> None:
    assert read_episodes([run]).count == 3 * 4


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_flip_of_any_byte_is_detected(run: Path, stride: int) -> None:
    path = record_files(run)[1]
    whole, identity = path.read_bytes(), run_identity(run)
    generator = random.Random(4)
    footer = len(whole) - 1000  # holds header, seal and layout
    for place in [*range(0, footer, stride), *range(footer, len(whole))]:
        flipped = bytearray(whole)
        flipped[place] ^= 1 << generator.randrange(8)
        path.write_bytes(flipped)
        with pytest.raises(DamagedRecord):
            verified_record(path, identity)
    path.write_bytes(whole)
    verified_record(path, identity)


def test_a_file_that_is_cut_off_anywhere_is_detected(run: Path) -> None:
    path = record_files(run)[1]
    whole = path.read_bytes()
    for length in [0, 1, *range(4, len(whole), 97), len(whole) - 1]:
        path.write_bytes(whole[:length])
        reason(path)
    path.write_bytes(whole + b"\0")
    assert reason(path) == "its checksum does not match"
    path.write_bytes(b"not a record")
    assert reason(path) == "it has no checksum, so it is cut off or not a record"


def test_swapped_files_are_detected(run: Path) -> None:
    first, second, _ = record_files(run)
    first.rename(run / "aside")
    second.rename(first)
    (run / "aside").rename(second)
    assert reason(first) == "it is the record of round 2"
    assert reason(second) == "it is the record of round 1"


def test_the_record_of_another_run_is_detected(run: Path, tmp_path: Path) -> None:
    place = {"telemetry_dir": str(tmp_path / "other"), "record": True, "rounds": 1}
    other = run_training(unflatten(SMALL | place), "random").path
    shutil.copy(record_path(other, 1), record_path(run, 1))
    expected = f"it belongs to another run, whose id is '{run_identity(other)}'"
    assert reason(record_path(run, 1)) == expected


def test_damaged_files_are_named_and_counted(run: Path, capsys) -> None:
    first, second, third = record_files(run)
    second.write_bytes(second.read_bytes()[:-1])
    third.write_bytes(first.read_bytes())
    with pytest.raises(UsageError) as error:
        read_episodes([run])
    assert str(error.value) == (
        f"records: {second} is damaged (its checksum does not match); --skip-bad leaves it out"
    )
    capsys.readouterr()
    reader = RecordReader([run], skip_bad=True)
    assert [part.rounds.tolist() for part in reader] == [[1] * 4]
    assert reader.skipped == [second, third]
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" (")[0] for line in lines[:2]] == [
        f"warning: skipped {second}",
        f"warning: skipped {third}",
    ]
    assert lines[2] == "warning: skipped 2 of 3 records, which are damaged"
    list(reader)
    assert reader.skipped == [second, third], "they are counted anew"
    first.write_bytes(b"")
    with pytest.raises(UsageError, match="all 3 records are damaged"):
        read_episodes([run], skip_bad=True)


def test_a_record_that_was_pruned_meanwhile_is_no_damage(run: Path) -> None:
    reader = RecordReader([run])
    record_files(run)[0].unlink()
    assert [part.rounds[0].item() for part in reader] == [2, 3]
    assert reader.skipped == []


def test_other_files_in_the_folder_are_no_records(run: Path) -> None:
    for name in ("round-000004.draft", "notes.txt", "round-4.parquet"):
        (run / "records" / name).write_text("")
    assert len(record_files(run)) == 3


def test_another_format_is_refused_even_with_skip_bad(run: Path) -> None:
    resealed(record_files(run)[0], format=2)
    for skip_bad in (False, True):
        with pytest.raises(UsageError, match="has format 2; this version reads 1; use the version"):
            read_episodes([run], skip_bad)


CHANGES = {
    "an additional host feature": (
        {"host": [*current_layout().host, "mood"]}, "with host feature mood",
    ),
    "a missing slot feature": (
        {"slots": current_layout().slots[:-1]}, "without slot feature log_channels",
    ),
    "renamed": (
        {"critic": ["twin_score", "lead", "known"]},
        "with critic feature lead and without critic feature gain",
    ),
    "another order": (
        {"host": current_layout().host[::-1]}, "with another order of every host feature",
    ),
    "another head": ({"heads": [*current_layout().heads, "colour"]}, "with action head colour"),
    "another option": (
        {"options": current_layout().options | {"style": ["LINEAR_ADD", "LOUD"]}},
        "with option of head style LOUD and without option of head style LINEAR_MULTIPLY",
    ),
    "options of an unknown head": (
        {"options": current_layout().options | {"colour": ["red"]}},
        "with option of head colour red",
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_another_observation_or_action_is_refused_by_name(run: Path, change: str) -> None:
    fields, named = CHANGES[change]
    path = record_files(run)[1]
    resealed(path, layout=msgspec.structs.replace(current_layout(), **fields))
    for skip_bad in (False, True):
        with pytest.raises(UsageError) as error:
            read_episodes([run], skip_bad)
        assert str(error.value).startswith(f"records: {path} was made {named}")
        assert "\n" not in str(error.value)


def test_a_blueprint_that_is_not_registered_is_named(run: Path, monkeypatch) -> None:
    fewer = BLUEPRINTS[:-1]
    monkeypatch.setattr(record_columns, "BLUEPRINTS", fewer)
    with pytest.raises(UsageError, match="was made with option of head blueprint flex_attention; "):
        read_episodes([run])


def test_the_layout_covers_every_head_of_the_policy() -> None:
    layout = current_layout()
    widths = {head: len(options) for head, options in layout.options.items()}
    assert widths == HEAD_WIDTHS
    assert set(layout.heads) - set(widths) == {"slot"}


@pytest.mark.parametrize(
    ("forged", "expected"),
    [
        (b"[]", "it has no header"),
        (b"{}", "it has no header"),
        (b"{", "it has no header"),
        (b'{"format": 1, "run": "x"}', "its header is wrong: "),
    ],
)
def test_a_forged_header_is_named(run: Path, forged: bytes, expected: str, monkeypatch) -> None:
    path = record_files(run)[0]
    header, _ = verified_record(path, run_identity(run))
    with monkeypatch.context() as patch:
        patch.setattr(records.msgspec.json, "encode", lambda header: forged)
        path.write_bytes(sealed_record(pyarrow.parquet.read_table(path), header))
    assert reason(path).startswith(expected)


def test_a_run_without_an_id_is_refused(run: Path) -> None:
    (run / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="holds no id, so the records cannot be checked"):
        read_episodes([run])


def test_headers_and_layouts_survive_the_file(run: Path) -> None:
    header, _ = verified_record(record_files(run)[0], run_identity(run))
    assert isinstance(header, RecordHeader)
    assert isinstance(header.layout, Layout)
    assert header.layout == current_layout()
    assert (header.round, header.policy, header.episodes, header.steps) == (1, "random", 4, 3)
    assert header.tasks["digits_shift"].slots == ["r0c0", "r0c1"]


def _without_rows(table: pyarrow.Table) -> pyarrow.Table:
    return table.slice(1)


def _without_column(table: pyarrow.Table) -> pyarrow.Table:
    return table.drop_columns(["reward"])


def _of_unknown_task(table: pyarrow.Table) -> pyarrow.Table:
    names = pyarrow.array(["nothing"] * len(table)).dictionary_encode()
    return table.set_column(table.schema.get_field_index("draw"), "draw", names)


def _with_column(name: str, value: object) -> Callable[[pyarrow.Table], pyarrow.Table]:
    """A change that gives one column the same value in every row."""

    def change(table: pyarrow.Table) -> pyarrow.Table:
        field = table.schema.field(name)
        values = pyarrow.array([value] * len(table), field.type)
        return table.set_column(table.schema.get_field_index(name), field, values)

    return change


@pytest.mark.parametrize(
    "change",
    [
        *(_without_rows, _without_column, _of_unknown_task),
        *(_with_column("actions", [number] * len(HEAD_WIDTHS) + [number]) for number in (-1, 999)),
        *(_with_column(name, None) for name in ("draw", "slots", "environment", "terminated")),
        *(_with_column(name, []) for name in ("slots", "blueprints", "legal_ops")),
    ],
)
def test_a_sealed_but_forged_record_is_one_line(
    run: Path, change: Callable[[pyarrow.Table], pyarrow.Table]
) -> None:
    path = record_files(run)[0]
    header, _ = verified_record(path, run_identity(run))
    path.write_bytes(sealed_record(change(pyarrow.parquet.read_table(path)), header))
    with pytest.raises(UsageError, match=r"^records: .* does not hold what its header says") as e:
        read_episodes([run])
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("changed", [{"steps": 0}, {"episodes": -4}, {"steps": 6}, {"tasks": {}}])
def test_a_sealed_header_of_other_numbers_is_one_line(
    run: Path, changed: dict[str, object]
) -> None:
    path = record_files(run)[0]
    resealed(path, **changed)
    with pytest.raises(UsageError, match=r"^records: .* does not hold what its header says"):
        read_episodes([run])
