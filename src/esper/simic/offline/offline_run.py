"""Learning a policy from records: in a new run directory, or continued from the best epoch."""

import dataclasses
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from esper.kasmina.transfer import CPU
from esper.leyline.config import TrainConfig
from esper.leyline.config.algorithm import algorithm_with
from esper.leyline.config.offline import ImitationConfig, OfflineConfig
from esper.leyline.config.setting import about, check_name, check_ranges, settings_of, typed
from esper.leyline.errors import UsageError, first_line
from esper.leyline.notices import notice
from esper.nissa.sinks import check_sinks
from esper.runtime.gate import NOTHING, Permission
from esper.runtime.paths import absolute_path
from esper.simic.growth.agent import GrowthMoments
from esper.simic.normalise import RunningMoments
from esper.simic.offline.methods import loss_of
from esper.simic.offline.offline_session import EpochSummary, OfflineObserver, OfflineSession
from esper.simic.offline.recorded_data import RecordedData, fit_moments, policy_config, read_data
from esper.simic.run.checkpoint import Checkpoint, load_latest
from esper.simic.run.identity import (
    Identity,
    announce_switches,
    check_same_run,
    lasting_settings,
    switches_on,
    warn_of_switches,
)
from esper.simic.run.run_directory import (
    RunDirectory,
    fingerprint_differences,
    machine_fingerprint,
    stored_config,
    stored_id,
)
from esper.simic.run.run_process import StopSignal
from esper.simic.trainer import Trainer
from esper.simic.training.setup import (
    arithmetic,
    compile_mode,
    half_precision,
    resolve_device,
    what_fits,
)
from esper.tamiyo.policy.factored_lstm import FactoredLSTM


@dataclass(frozen=True, slots=True)
class OfflineSummary:
    """Outcome of one process of a run that learns from records.

    Attributes:
        path: the run directory.
        status: ``finished``, ``interrupted`` or ``failed``.
        exit_code: 0; 128 plus the number of the signal that ended the run; or 1 if the run failed
            or its best epoch could not be saved.
        epochs: summaries of this process's epochs.
        best: the epoch whose policy is kept; 0 if none ended.
        wall_seconds: duration of this process.
    """

    path: Path
    status: str
    exit_code: int
    epochs: list[EpochSummary]
    best: int
    wall_seconds: float


class SilentObserver:
    """An observer that does nothing."""

    def started(self, directory: RunDirectory, data: RecordedData, done: int, total: int) -> None:
        """See ``OfflineObserver``."""

    def epoch_done(self, summary: EpochSummary) -> None:
        """See ``OfflineObserver``."""


def learn_offline(
    config: ImitationConfig,
    *,
    resume: Path | None = None,
    observer: OfflineObserver | None = None,
    permission: Permission = NOTHING,
) -> OfflineSummary:
    """Learn a policy from the records of other runs.

    For example ``learn_offline(OfflineConfig(records=("runs/A",), method="awr"))``.

    Args:
        config: settings; an ``ImitationConfig`` clones, an ``OfflineConfig`` has a choice of
            methods.
        resume: run directory to continue from its best epoch, see ``resumed_config``.
        observer: notified of every epoch.
        permission: without which the plugins of the runs must have been loaded.

    Raises:
        UsageError: a setting is invalid or the records are unusable, and no run directory was
            created or changed; or a batch does not fit into the memory of the device.
    """
    begin = time.perf_counter()
    _check(config)
    device = resolve_device(config.device)
    threads = config.threads or torch.get_num_threads()
    data = read_data(config, permission)
    settings = policy_config(config, algorithm_with(type(config)).name, data.world, threads)
    check_sinks(settings.output)
    with arithmetic(device, threads, config.tf32):
        trainer = build_trainer(config, data, device, threads)
        stop = StopSignal()
        # Up to here nothing has been written, so a signal may end the process at once.
        announce_switches()
        with stop.listening():
            directory, checkpoint = _open(settings, config, data, trainer, device, resume)
            session = OfflineSession(
                directory=directory,
                config=config,
                settings=settings,
                data=data,
                trainer=trainer,
                observer=observer or SilentObserver(),
                stop=stop,
                identity=_identity(directory.path, config),
            )
            if checkpoint is not None:
                session.done = checkpoint.round
                loss = float(checkpoint.parts["counters"]["held_out_loss"])
                session.best = session.done, loss
            try:
                epochs = session.run()
            except torch.OutOfMemoryError as error:
                raise what_fits(error, config.batch_size, device, "batch_size") from error
            finally:
                directory.close()
    seconds = time.perf_counter() - begin
    status, code = session.status, session.code
    return OfflineSummary(directory.path, status, code, epochs, session.best[0], seconds)


def resumed_config(
    kind: type[ImitationConfig], run: Path, changes: dict[str, Any]
) -> ImitationConfig:
    """The settings of a run that is to be continued.

    Args:
        kind: class of the settings.
        run: the run directory.
        changes: settings for the continuation; only those marked ``on_resume`` may differ.

    Raises:
        UsageError: there is no such run, another command made it, or a setting differs that may
            not change.
    """
    config, _ = stored_config(run)
    algorithm = config.method.algorithm
    command = algorithm_with(kind).name
    if algorithm != command:
        raise UsageError(
            f"resume: {run} learns by {algorithm}; resume it with esper train {algorithm}"
        )
    fields = settings_of(kind)
    try:
        content = json.loads((run / "config.json").read_text(encoding="utf-8"))[_KEY]
        before = {n: typed(n, content["settings"][n], f.type) for n, f in fields.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"resume: {run / 'config.json'} does not say how {run} learns; start a new run"
        ) from error
    if "records" in changes:
        changes = changes | {"records": _absolute(changes["records"])}
    for name, value in changes.items():
        if value != before.get(name) and not about(fields[name]).on_resume:
            raise UsageError(
                f"{name}: the run has {before.get(name)}, and resuming cannot change it; omit it, "
                "or start a new run"
            )
    return kind(**{**before, **changes})


def build_trainer(
    config: ImitationConfig, data: RecordedData, device: torch.device, threads: int
) -> Trainer:
    """A trainer at the start of learning, its moments fitted to the data.

    Raises:
        UsageError: the device does not have the precision that is asked for.
    """
    amp = device.type == "cuda" if config.amp is None else config.amp
    amp_dtype = half_precision(config.amp_dtype, device, "amp") if amp else None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        policy = FactoredLSTM(config.lstm_hidden)
    policy.to(device)
    policy.amp_dtype = amp_dtype
    # Fitted where the records are; then moved, because it takes a few small tensors.
    record_moments, record_returns = GrowthMoments(CPU), RunningMoments((), CPU)
    fit_moments(data, record_moments, record_returns)
    moments, return_moments = GrowthMoments(device), RunningMoments((), device)
    for name, part in moments.parts().items():
        part.load(record_moments.parts()[name].state())
    return_moments.load(record_returns.state())
    return Trainer(
        policy,
        moments,
        return_moments,
        loss_of(config, return_moments),
        policy_config(config, algorithm_with(type(config)).name, data.world, threads).learner,
        device,
        compile_mode(config.compile, device),
    )


def _check(config: ImitationConfig) -> None:
    """Refuse settings that are out of range or contradict each other."""
    check_ranges(type(config), dataclasses.asdict(config))
    check_name(config.name)
    if isinstance(config, OfflineConfig) and config.c_clip > config.rho_clip:
        raise UsageError(
            f"c_clip: must be at most rho_clip, {config.rho_clip}, got {config.c_clip}"
        )


_KEY = "offline"
"""The key of ``config.json`` under which the settings of learning are."""


def _open(
    settings: TrainConfig,
    config: ImitationConfig,
    data: RecordedData,
    trainer: Trainer,
    device: torch.device,
    resume: Path | None,
) -> tuple[RunDirectory, Checkpoint | None]:
    """A new run directory, or the continued one with its best checkpoint, restored."""
    fingerprint = machine_fingerprint(device, settings, "records")
    records = _absolute(config.records)
    facts = {
        "settings": msgspec.to_builtins(dataclasses.replace(config, records=records)),
        "identities": data.identities,
        "episodes": data.episodes.count,
    }
    if resume is None:
        return RunDirectory.create(settings, fingerprint, {_KEY: facts}), None
    directory = RunDirectory(resume)
    try:
        checkpoint = load_latest(resume)
        if config.epochs <= checkpoint.round:
            raise UsageError(
                f"epochs: the best epoch of {resume} is {checkpoint.round}; give a larger total"
            )
        now = _identity(resume, resumed_config(type(config), resume, {}))
        check_same_run(resume, checkpoint.identity, now, plugins_given=True)
        _check_same_data(resume, facts)
        _, then = stored_config(resume)
        try:
            trainer.load_state(checkpoint.parts)
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            reason = first_line(error)
            raise UsageError(
                f"resume: the checkpoint belongs to another network ({reason})"
            ) from error
        directory.cut_events(checkpoint.events_bytes, checkpoint.round)
        directory.note_resume(settings, fingerprint, {_KEY: facts})
    except UsageError:
        directory.abandon()
        raise
    warn_of_switches(checkpoint.identity, now)
    for difference in fingerprint_differences(then, fingerprint):
        notice(f"warning: results may differ in the last bits ({difference})")
    return directory, checkpoint


def _identity(run: Path, config: ImitationConfig) -> Identity:
    """The identity of a run with these settings of learning."""
    settings = lasting_settings(settings_of(type(config)), msgspec.to_builtins(config))
    settings["records"] = list(_absolute(config.records))
    return Identity(run=stored_id(run), settings=settings, switches=switches_on())


def _absolute(records: Sequence[str]) -> tuple[str, ...]:
    """Absolute paths, so that the run can be resumed from any directory."""
    return tuple(absolute_path(run) for run in records)


def _check_same_data(run: Path, content: dict[str, Any]) -> None:
    """Refuse to continue with other records than before."""
    before = json.loads((run / "config.json").read_text(encoding="utf-8")).get(_KEY, {})
    for name in ("identities", "episodes"):
        if before.get(name) != content[name]:
            raise UsageError(
                f"records: {run} has learned from {before.get(name)} ({name}), and there are "
                f"{content[name]} now; start a new run"
            )
