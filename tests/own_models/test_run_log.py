"""What ``esper.grow`` writes into its run directory, and who shows it."""

import os
from pathlib import Path

import pytest

import esper
from esper.karn.grown_runs import Growth, inspect_grown, read_growth
from esper.karn.queries import Store
from esper.leyline.disk import lock_file
from esper.leyline.errors import UsageError
from esper.leyline.events import Event, GrowthEpochCompleted
from esper.own_models.growth_result import EpochRecord
from esper.scripts.report import report
from grown_modules import EPOCHS, logged_growth
from run_directories import recorded_run
from wide_modules import multilayer


def assert_tells(growth: Growth, result: esper.GrowthResult) -> None:
    """The events have the epochs, decisions and verdict of the result and its twin."""
    assert growth.start is not None
    assert growth.end is not None
    assert result.twin is not None
    for variant, one in (("grown", result), ("twin", result.twin)):
        curve = growth.curves[variant, 1]
        assert list(curve) == [record.epoch for record in one.history]
        for event, record in zip(curve.values(), one.history, strict=True):
            assert event.figure == record.validation.figure
            assert event.loss == record.validation.loss
            assert event.parameters == record.parameters
            assert event.actions == record.actions
    assert growth.start.parameters == result.host_parameters
    assert growth.end.verdict == result.verdict()
    assert growth.end.paid == result.paid
    assert growth.end.parameters == [result.parameters, result.twin.parameters]
    assert growth.end.validation == [x.validation.figure for x in (result, result.twin)]
    changes = {
        f"{name}.{size}": f"{before} -> {after}"
        for name, sizes in result.widths.items()
        for size, (before, after) in sizes.items()
        if before != after
    }
    assert growth.end.grew == changes != {}


def test_the_run_directory_tells_what_the_result_tells(tmp_path: Path) -> None:
    result = logged_growth(tmp_path / "mine", tensorboard=True)
    assert_tells(read_growth(tmp_path / "mine"), result)
    assert any("channels" in text for *_, text in read_growth(tmp_path / "mine").decisions())
    assert result.test is not None
    assert result.twin is not None
    assert result.twin.test is not None
    info = inspect_grown(tmp_path / "mine")
    assert (info.status, info.rounds_done, info.policy) == ("finished", EPOCHS, "widen")
    assert info.gain == pytest.approx(100 * (result.test.figure - result.twin.test.figure))
    with Store([tmp_path]) as store:
        sql = "select variant, count(*) n, max(epoch) m from growth_epoch_completed group by 1"
        rows = store.query(sql).to_pylist()
    assert sorted((r["variant"], r["n"], r["m"]) for r in rows) == [("grown", 4, 4), ("twin", 4, 4)]
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    scalars = accumulator.EventAccumulator(str(tmp_path / "mine" / "tensorboard")).Reload()
    for name, each in (("grown/accuracy", result), ("twin/accuracy", result.twin)):
        curve = [(point.step, point.value) for point in scalars.Scalars(name)]
        expected = [(record.epoch, record.validation.accuracy) for record in each.history]
        assert curve == [(epoch, pytest.approx(value)) for epoch, value in expected]


def test_a_resumed_growth_has_each_epoch_once(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(record: EpochRecord) -> None:
        if record.epoch == 3:
            raise Stop

    folder, file = tmp_path / "run", tmp_path / "progress.pt"
    with pytest.raises(Stop):
        logged_growth(folder, checkpoint=file, callbacks=[stop])
    assert inspect_grown(folder).status == "interrupted"
    result = logged_growth(folder, checkpoint=file)
    assert_tells(read_growth(folder), result)
    # Begun anew, with fewer epochs than before: nothing is left of those that came later.
    file.unlink()
    result = logged_growth(folder, epochs=2)
    assert_tells(read_growth(folder), result)


def test_epochs_that_are_repeated_replace_what_came_after_them() -> None:
    def epoch(variant: str, number: int, figure: float) -> Event:
        return GrowthEpochCompleted(
            time=0.0, variant=variant, attempt=1, epoch=number, unit="accuracy", figure=figure,
            loss=1.0, train_loss=None, parameters=1, stages={}, actions=[],
        )  # fmt: skip

    events = [epoch("grown", 1, 0.1), epoch("grown", 2, 0.2), epoch("twin", 1, 0.3)]
    growth = Growth.of([*events, epoch("grown", 1, 0.4)])
    figures = {place: [e.figure for e in c.values()] for place, c in growth.curves.items()}
    assert figures == {("grown", 1): [0.4]}


def test_a_run_directory_has_one_writer_and_trackers_need_one(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with (
        lock_file(folder / "events.lock"),
        pytest.raises(UsageError, match="run_directory: another process works in"),
    ):
        logged_growth(folder)
    assert not (folder / "events.jsonl").exists()
    with pytest.raises(UsageError, match="tensorboard: give run_directory as well"):
        esper.grow(multilayer(), [], [], tensorboard=True)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"run_directory: cannot use .*file"):
        logged_growth(tmp_path / "file")


def test_the_report_answers_whether_growth_paid(tmp_path: Path, capsys) -> None:
    result, target = logged_growth(tmp_path / "mine"), tmp_path / "page.html"
    assert report([str(tmp_path / "mine"), "-o", str(target)]) == 0
    page = target.read_text()
    for line in result.verdict().splitlines():
        assert line in page
    for name in ("Accuracy on validation", "Parameters", "Validation loss", "Training loss"):
        assert "<title id=" in page
        assert f">{name}</title>" in page
    for name, sizes in result.widths.items():
        assert f"{name}." in page
        assert sizes
    for *_, text in read_growth(tmp_path / "mine").decisions():
        assert text.replace(">", "&gt;") in page
    logged_growth(tmp_path / "other", seed=1)
    assert report([str(tmp_path), "-o", str(target)]) == 0
    assert "mine, grown" in target.read_text()
    assert "other, twin" in target.read_text()
    run = recorded_run(tmp_path / "run")
    with pytest.raises(UsageError, match="one report shows one kind"):
        report([str(run), str(tmp_path / "mine"), "-o", str(target)])


def test_a_full_disk_ends_telemetry_but_not_growth(tmp_path: Path, capfd) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    os.symlink("/dev/full", folder / "events.jsonl")
    result = logged_growth(folder)
    assert len(result.history) == EPOCHS
    assert "telemetry: JsonLines stopped" in capfd.readouterr().err
