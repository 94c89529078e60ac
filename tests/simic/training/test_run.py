"""Whole runs: directory, events, checkpoints and resuming."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet
import pytest
import torch

import esper
from esper.karn.runs import inspect
from esper.karn.store import read_events
from esper.leyline import disk
from esper.leyline.actions import HEADS
from esper.leyline.config import TrainConfig, unflatten
from esper.leyline.errors import UsageError
from esper.leyline.events import (
    AnalyticsSnapshot,
    CheckpointSaved,
    EpisodeOutcome,
    EpochCompleted,
    Event,
    PPOUpdateCompleted,
    SeedFossilized,
    SeedGerminated,
    SeedPruned,
    SeedSignalsMeasured,
    TrainingFinished,
    TrainingStarted,
)
from esper.leyline.metrics import METRICS, Metric, part_metric
from esper.native.build import Unavailable
from esper.nissa.hub import Hub
from esper.nissa.sinks import JsonLines
from esper.runtime.tasks import TASKS, find
from esper.simic.run import checkpoint
from esper.simic.run.checkpoint import load_latest
from esper.simic.run.run_directory import RunDirectory, stored_config
from esper.simic.training.setup import (
    build_environment,
    complete_config,
    growth_config,
    resolve_tasks,
)
from esper.simic.training.vectorized import resume_ppo, run_training, train_ppo_vectorized
from esper.tolaria.backends import choice
from small_runs import SMALL, assert_same, timeless
from synthetic import CPU

TINY = SMALL | {"episode_length": 6, "seed": 5, "threads": None, "telemetry_level": "normal"}


def tiny(directory: Path, **settings: object) -> TrainConfig:
    return unflatten({**TINY, "rounds": 2, "telemetry_dir": str(directory), **settings})


@pytest.fixture(scope="module")
def two_rounds(tmp_path_factory) -> Path:
    """A finished run, to be read only."""
    return train_ppo_vectorized(tiny(tmp_path_factory.mktemp("two"))).path


@pytest.fixture(scope="module")
def three_rounds(tmp_path_factory) -> Path:
    """What the same run is after a third round without interruption, to be read only."""
    return train_ppo_vectorized(tiny(tmp_path_factory.mktemp("three"), rounds=3)).path


@pytest.fixture
def run(two_rounds: Path, tmp_path: Path) -> Path:
    """A copy of the finished run of two rounds."""
    return shutil.copytree(two_rounds, tmp_path / "run")


def test_a_run_directory_has_the_documented_files(tmp_path: Path) -> None:
    summary = train_ppo_vectorized(tiny(tmp_path))
    run = summary.path
    assert (summary.status, summary.exit_code, len(summary.rounds)) == ("finished", 0, 2)
    assert run.parent == tmp_path
    content = json.loads((run / "config.json").read_text())
    assert content["settings"]["envs"] == 4
    assert content["fingerprint"]["torch"] == torch.__version__
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["000001", "000002"]

    started = next(read_events(run, TrainingStarted))
    assert (started.tasks, started.policy, started.slots) == (
        ["digits_shift"],
        "ppo",
        [["r0c0", "r0c1"]],
    )
    epochs = list(read_events(run, EpochCompleted))
    assert [(e.round, e.step) for e in epochs] == [(r, t) for r in (1, 2) for t in range(1, 7)]
    assert all(len(e.train_loss) == 4 and len(e.stage[0]) == 2 for e in epochs)
    assert [s.amp_enabled for s in read_events(run, AnalyticsSnapshot)] == [False, False]
    assert [c.round for c in read_events(run, CheckpointSaved)] == [1, 2]
    assert [f.status for f in read_events(run, TrainingFinished)] == ["finished"]
    parquet = pyarrow.parquet.read_table(run / "events.parquet")
    assert parquet.num_rows == len((run / "events.jsonl").read_text().splitlines())


def test_every_update_reports_finite_gradient_norms_of_all_heads(run: Path) -> None:
    for update in read_events(run, PPOUpdateCompleted):
        of_impala = {Metric.LAG_KL, Metric.RHO_CLIP_FRACTION, Metric.VERSION_LAG}
        words = "negative_log", "held_out", "expected_gain"
        of_records = {name for name in METRICS if any(word in name for word in words)}
        only_with_a_setting = {
            *(Metric.AMP_SCALE, Metric.VALUE_WEIGHT),
            *(part_metric(Metric.ENTROPY_WEIGHT, head) for head in HEADS),
        }
        absent = of_impala | of_records | only_with_a_setting
        assert update.metrics.keys() == METRICS.keys() - absent
        for head in HEADS:
            norm = update.metrics[f"head_grad_norms/{head}"]
            assert isinstance(norm, float | int), (head, norm)
        assert update.metrics["first_ratio_max"] == pytest.approx(1.0, abs=1e-5)
        assert update.metrics["first_kl"] == pytest.approx(0.0, abs=1e-6)
        assert "learning_rate" in update.metrics
        assert "explained_variance" in update.metrics


def test_outcomes_agree_with_the_seeds_events(tmp_path: Path) -> None:
    """The counts of a round and the single events come from different code."""
    config = tiny(tmp_path, rounds=1, envs=16, episode_length=16)
    run = run_training(config, "random").path
    outcome = next(read_events(run, EpisodeOutcome))
    for kind, tally in (
        (SeedGerminated, outcome.germinated),
        (SeedFossilized, outcome.fossilised),
        (SeedPruned, outcome.pruned),
    ):
        counted = [0] * 16
        for event in read_events(run, kind):
            for environment in event.environment:
                counted[environment] += 1
        assert counted == tally, kind
    assert sum(outcome.germinated) > 0
    assert sum(outcome.pruned) > 0


def test_the_split_seed_is_recorded_and_kept_when_the_run_is_resumed(tmp_path: Path) -> None:
    straight = train_ppo_vectorized(tiny(tmp_path / "straight", rounds=2, split_seed=5)).path
    parted = train_ppo_vectorized(tiny(tmp_path / "parted", rounds=1, split_seed=5)).path
    resume_ppo(parted, {"rounds": 2})
    assert timeless(straight) == timeless(parted)
    assert json.loads((parted / "config.json").read_text())["settings"]["split_seed"] == 5
    assert [event.split_seed for event in read_events(parted, TrainingStarted)] == [5, 5]
    other = train_ppo_vectorized(tiny(tmp_path / "other", rounds=2)).path
    assert timeless(other) != timeless(straight)
    with pytest.raises(UsageError, match=r"^split_seed:"):
        resume_ppo(parted, {"rounds": 3, "split_seed": 6})


def test_events_of_an_unsaved_round_are_not_duplicated(three_rounds: Path, tmp_path: Path) -> None:
    """A process that dies between the end of a round and its checkpoint leaves events behind."""
    run = shutil.copytree(three_rounds, tmp_path / "cut")
    for path in (run / "checkpoints" / "000003").iterdir():
        path.unlink()
    (run / "checkpoints" / "000003").rmdir()
    with (run / "events.jsonl").open("ab") as events:
        events.write(b'{"event_type":"EPOCH_COMP')
    resume_ppo(run, {})
    assert timeless(three_rounds) == timeless(run)
    assert [c.round for c in read_events(run, CheckpointSaved)] == [1, 2, 3]


def test_the_telemetry_level_changes_what_is_written_not_what_is_computed(tmp_path: Path) -> None:
    runs = {
        level: train_ppo_vectorized(tiny(tmp_path / level, telemetry_level=level)).path
        for level in ("off", "minimal", "normal", "debug")
    }
    parts = {level: load_latest(run).parts for level, run in runs.items()}
    for level in ("off", "minimal", "debug"):
        assert_same(parts["normal"], parts[level])
    assert not (runs["off"] / "events.jsonl").exists()
    assert not list(read_events(runs["minimal"], EpochCompleted))
    assert list(read_events(runs["minimal"], EpisodeOutcome))
    assert not list(read_events(runs["normal"], SeedSignalsMeasured))
    assert len(list(read_events(runs["debug"], SeedSignalsMeasured))) == 12


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"rounds": 2}, "rounds"),
        ({"rounds": 3, "envs": 8}, "envs"),
        ({"rounds": 3, "learning_rate": 0.1}, "learning_rate"),
    ],
)
def test_a_refused_resume_changes_no_file(run: Path, settings: dict, names: str) -> None:
    before = (run / "events.jsonl").read_bytes()
    with pytest.raises(UsageError, match=f"^{names}:"):
        resume_ppo(run, settings)
    assert (run / "events.jsonl").read_bytes() == before
    assert stored_config(run)[0].world.rounds == 2


def out_of_room(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(("failing", "code"), [((2,), 0), ((3,), 1), ((1, 2, 3), 1)])
def test_a_full_disk_loses_a_checkpoint_but_not_the_run(
    tmp_path: Path, failing: tuple[int, ...], code: int, monkeypatch, capsys
) -> None:
    """The run fails only if the last round cannot be saved, and then it can be resumed."""
    original = checkpoint.write_synced

    def write(path: Path, content: bytes) -> None:
        number = int(path.parent.name.removeprefix(".draft-"))
        (out_of_room if number in failing else original)(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_synced", write)
        summary = train_ppo_vectorized(tiny(tmp_path, rounds=3, keep_checkpoints=1))
    status, run = ("finished", "failed")[code], inspect(summary.path)
    assert (summary.status, summary.exit_code, len(summary.rounds)) == (status, code, 3)
    assert (run.status, run.resume is not None) == (status, failing == (3,))
    assert capsys.readouterr().err.splitlines() == [
        f"warning: checkpoint: round {number} was not saved (No space left on device); "
        + ("there is no earlier one" if 1 in failing else "earlier checkpoints stay")
        for number in failing
    ]
    saved = [number for number in (1, 2, 3) if number not in failing]
    assert [event.round for event in read_events(summary.path, CheckpointSaved)] == saved
    assert not saved or load_latest(summary.path).round == saved[-1]


def test_a_full_disk_loses_events_but_not_the_run(
    three_rounds: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    """Events before stay readable, and so do events after there is space again."""
    original = JsonLines.write

    def write(self: JsonLines, event: Event) -> None:
        if isinstance(event, EpochCompleted) and (event.round, event.step) == (2, 4):
            self._file.write(b'{"event_type":"EPOCH_COMP')
            self._file.flush()
            out_of_room()
        original(self, event)

    with monkeypatch.context() as patch:
        patch.setattr(JsonLines, "write", write)
        summary = train_ppo_vectorized(tiny(tmp_path / "full", rounds=2))
    run = summary.path
    assert summary.exit_code == 0
    (line,) = capsys.readouterr().err.splitlines()
    reason = "[Errno 28] No space left on device"
    assert line == f"telemetry: JsonLines stopped: {reason}; training is not affected"
    assert load_latest(run).round == 2
    resume_ppo(run, {"rounds": 3})
    assert_same(load_latest(run).parts, load_latest(three_rounds).parts)
    recorded = [(e.round, e.step) for e in read_events(run, EpochCompleted)]
    assert recorded == [(1, t) for t in range(1, 7)] + [(2, 1), (2, 2), (2, 3)] + [
        (3, t) for t in range(1, 7)
    ]
    assert [e.round for e in read_events(run, TrainingStarted)] == [0, 2]


@pytest.mark.parametrize("where", ["pathlib.Path.mkdir", "os.fsync", "fcntl.flock"])
def test_a_run_directory_that_cannot_be_created_leaves_no_files(
    tmp_path: Path, where: str, monkeypatch
) -> None:
    monkeypatch.setattr(where, out_of_room)
    with pytest.raises(UsageError, match="No space left on device") as found:
        train_ppo_vectorized(tiny(tmp_path))
    assert "\n" not in str(found.value)
    assert list(tmp_path.iterdir()) == []


def files_of(run: Path) -> dict[Path, bytes | None]:
    return {p: p.read_bytes() if p.is_file() else None for p in run.rglob("*")}


def a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGED_RUN: dict[str, Callable[[Path], object]] = {
    "settings are null": lambda run: (run / "config.json").write_text('{"settings": null}'),
    "settings are a list": lambda run: (run / "config.json").write_text("[]"),
    "settings are a directory": lambda run: a_directory(run / "config.json"),
    "events are a directory": lambda run: a_directory(run / "events.jsonl"),
    "checkpoints are gone": lambda run: shutil.rmtree(run / "checkpoints"),
}


@pytest.mark.parametrize("locked_before", [True, False])
@pytest.mark.parametrize("what", ["checkpoints are gone", "events are a directory"])
def test_a_refused_resume_leaves_no_new_files(run: Path, what: str, locked_before: bool) -> None:
    DAMAGED_RUN[what](run)
    if not locked_before:
        (run / "lock").unlink()
    before = files_of(run)
    with pytest.raises(UsageError, match=r"^resume: "):
        resume_ppo(run, {"rounds": 3})
    assert files_of(run) == before


def test_a_lock_file_removed_by_its_owner_is_not_accepted(tmp_path: Path) -> None:
    """A process that opened the file before its removal must not take that lock as its own."""
    path = tmp_path / "lock"
    given_up = RunDirectory(tmp_path)
    with path.open("ab") as opened, pytest.MonkeyPatch.context() as patch:
        given_up.abandon()
        assert not path.exists()
        handed = iter([opened])
        original = Path.open
        patch.setattr(Path, "open", lambda self, mode: next(handed, None) or original(self, mode))
        held = RunDirectory(tmp_path)
    with pytest.raises(UsageError, match="another process"):
        RunDirectory(tmp_path)
    held.close()


def test_a_settings_file_that_cannot_be_rewritten_is_kept(run: Path, monkeypatch) -> None:
    before = (run / "config.json").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(disk, "write_synced", out_of_room)
        with pytest.raises(UsageError, match=r"^resume: cannot write .*config\.json \(No space"):
            resume_ppo(run, {"rounds": 3})
    assert (run / "config.json").read_bytes() == before
    assert len(resume_ppo(run, {"rounds": 3}).rounds) == 1


def test_interrupted_cutting_of_events_can_be_repeated(
    run: Path, tmp_path: Path, monkeypatch
) -> None:
    """The kept lines are written before the file is truncated; repeating gives the same file."""
    (run / "checkpoints" / "000002").rename(tmp_path / "gone")
    before = load_latest(run)
    with (run / "events.jsonl").open("ab") as events:
        events.write(b'{"event_type":"TRAINING_FINISHED","time":9.0,"round":1,"status":"late"}\n')
    directory, original = RunDirectory(run), (run / "events.jsonl").read_bytes()
    directory.cut_events(before.events_bytes, before.round)
    expected = (run / "events.jsonl").read_bytes()
    kept = expected[before.events_bytes :]
    assert b"CHECKPOINT_SAVED" in kept
    assert kept.count(b'"late"') == 1
    (run / "events.jsonl").write_bytes(expected + original[len(expected) :])
    directory.cut_events(before.events_bytes, before.round)
    directory.close()
    assert (run / "events.jsonl").read_bytes() == expected


def test_the_backend_that_computes_is_stored(tmp_path: Path) -> None:
    run = train_ppo_vectorized(tiny(tmp_path, rounds=1, backend="auto", device="cpu")).path
    content = json.loads((run / "config.json").read_text())
    environment = build_environment(tiny(tmp_path), (torch.device("cpu"),))
    assert content["fingerprint"]["backend"] == environment.backend_name
    assert content["settings"]["backend"] == environment.backend_name in ("native", "torch")


def test_differences_that_may_change_the_last_bits_are_reported(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    """Here the second machine has no compiler, and so no native backend."""
    run = train_ppo_vectorized(tiny(tmp_path, rounds=1, threads=1)).path
    then = stored_config(run)[1]
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(esper, "__version__", "9.9")

    def missing(*_: object) -> None:
        raise Unavailable("there is no C++ compiler")

    monkeypatch.setattr(choice, "NativeBackend", missing)
    resume_ppo(run, {"rounds": 2, "threads": 2})
    differences = {f"esper: {then['esper']} then, 9.9 now", "threads: 1 then, 2 now"}
    if then["backend"] == "native":
        differences.add("backend: native then, torch now")
    lines = [line for line in capsys.readouterr().err.splitlines() if "last bits" in line]
    assert set(lines) == {
        f"warning: results may differ in the last bits ({d})" for d in differences
    }
    # The setting is kept, so that the first machine can continue as it began.
    assert stored_config(run)[0].machine.backend == then["backend"]
    capsys.readouterr()
    monkeypatch.undo()
    resume_ppo(run, {"rounds": 3, "threads": 1})
    assert "last bits" not in capsys.readouterr().err


def test_the_heuristic_writes_the_same_events_and_no_checkpoint(tmp_path: Path) -> None:
    summary = run_training(tiny(tmp_path, rounds=1), "heuristic")
    assert next(read_events(summary.path, TrainingStarted)).policy == "heuristic"
    assert len(list(read_events(summary.path, EpochCompleted))) == 6
    assert not list(read_events(summary.path, PPOUpdateCompleted))
    assert not (summary.path / "checkpoints").exists()


def test_settings_are_stored_resolved(tmp_path: Path) -> None:
    config = tiny(tmp_path, slots=["late"], max_batches=None)
    run = train_ppo_vectorized(config).path
    stored = stored_config(run)[0]
    assert stored.world.slots == ("r0c1",)
    assert (stored.world.max_batches, stored.world.max_seeds) == (8, 1)
    assert stored.machine.threads == torch.get_num_threads()
    resume_ppo(run, {"rounds": 3})
    content = json.loads((run / "config.json").read_text())
    assert content["settings"]["rounds"] == 3
    assert len(content["resumed"]) == 1


def test_tasks_with_other_slots_leave_slots_and_seeds_open(tmp_path: Path) -> None:
    config = tiny(tmp_path, task=["digits_shift", "digits_deep"])
    stored = complete_config(config, build_environment(config, [CPU]), "torch").world
    assert (stored.slots, stored.max_seeds) == ((), None)


def test_use_amp_may_be_given_by_either_name(tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    train_ppo_vectorized(tiny(tmp_path, rounds=1), amp=True)
    assert capsys.readouterr().err.count("use_amp") == 1
    with pytest.raises(UsageError, match=r"^envs:"):
        train_ppo_vectorized(n_envs=2, envs=4)


@pytest.mark.parametrize("what", DAMAGED_RUN)
def test_a_damaged_run_directory_is_a_usage_error(run: Path, what: str) -> None:
    DAMAGED_RUN[what](run)
    with pytest.raises(UsageError, match=r"^resume: "):
        resume_ppo(run, {"rounds": 3})


def of_another_round(checkpoint: Path) -> None:
    content = json.loads((checkpoint / "manifest.json").read_text())
    (checkpoint / "manifest.json").write_text(json.dumps(content | {"round": 1}))


DAMAGED_CHECKPOINT: dict[str, Callable[[Path], object]] = {
    "manifest is a list": lambda folder: (folder / "manifest.json").write_text("[]"),
    "manifest says another round": of_another_round,
    "part is missing": lambda folder: (folder / "moments.pt").unlink(),
    "part is empty": lambda folder: (folder / "optimizer.pt").write_bytes(b""),
}


@pytest.mark.parametrize("what", DAMAGED_CHECKPOINT)
def test_a_corrupt_checkpoint_is_skipped(three_rounds: Path, run: Path, what: str, capsys) -> None:
    DAMAGED_CHECKPOINT[what](run / "checkpoints" / "000002")
    resumed = resume_ppo(run, {"rounds": 3})
    assert [r.round for r in resumed.rounds] == [2, 3]
    assert "000002 is corrupt" in capsys.readouterr().err
    assert_same(load_latest(run).parts, load_latest(three_rounds).parts)


def test_a_truncated_event_file_is_continued(run: Path) -> None:
    events = run / "events.jsonl"
    events.write_bytes(events.read_bytes()[:-300])
    resume_ppo(run, {"rounds": 3})
    assert b"\0" not in events.read_bytes()
    assert [e.step for e in read_events(run, EpochCompleted) if e.round == 3] == [1, 2, 3, 4, 5, 6]


def test_the_hub_calls_of_a_step_do_not_depend_on_the_environments(
    tmp_path: Path, monkeypatch
) -> None:
    handed: list[int] = []
    original = Hub.emit_later

    def counted(self: Hub, make: object) -> None:
        handed.append(1)
        original(self, make)  # type: ignore[arg-type]

    monkeypatch.setattr(Hub, "emit_later", counted)
    counts = []
    for envs in (2, 16):
        handed.clear()
        run_training(tiny(tmp_path / str(envs), rounds=1, envs=envs), "random")
        counts.append(len(handed))
    assert counts[0] == counts[1]
    assert counts[0] <= 6 + 5, "six steps, and the events of the run and the round"


@pytest.mark.parametrize("name", list(TASKS))
def test_a_task_is_trained_with_its_own_slots(name: str) -> None:
    (task,) = resolve_tasks(unflatten({"task": name}))
    own = find(name).host.slots
    assert task.host.slots == own
    (late,) = resolve_tasks(unflatten({"task": name, "slots": ["late"]}))
    assert late.host.slots == own[-1:]


def test_hosts_on_a_gpu_have_one_thread_and_others_those_asked_for() -> None:
    config = unflatten({"task": "digits", "threads": 3})
    tasks = resolve_tasks(config)
    threads = [growth_config(config, tasks, torch.device(kind)).threads for kind in ("cpu", "cuda")]
    assert threads == [3, 1]
