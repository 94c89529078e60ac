"""Training a policy: rounds of rollouts of N environments, one update per round."""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from esper.leyline.config import TrainConfig, check, flatten, unflatten
from esper.leyline.config.algorithm import learns_by_acting
from esper.leyline.config.reading import run_settings, with_horizons
from esper.leyline.config.setting import about
from esper.leyline.errors import UsageError
from esper.leyline.notices import notice
from esper.nissa.sinks import check_sinks
from esper.runtime import plugins
from esper.runtime.gate import NOTHING, Permission
from esper.simic.growth.environment import GrowthEnv
from esper.simic.records.record_writer import RecordWriter, remove_records_after
from esper.simic.run.checkpoint import latest_identity, load_latest
from esper.simic.run.identity import (
    announce_switches,
    check_same_run,
    identity_of,
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
from esper.simic.training.growth_trainee import GrowthTrainee
from esper.simic.training.gym_trainee import GymTrainee
from esper.simic.training.run_lines import gradient_counts, schedule_ends
from esper.simic.training.session import NullObserver, Observer, Session
from esper.simic.training.setup import arithmetic, memory_error, resolve_devices, what_fits
from esper.simic.training.trainee import Trainee
from esper.tamiyo.baselines import Actor


@dataclass(frozen=True, slots=True)
class RunSummary:
    """Outcome of one process of a run.

    Attributes:
        path: the run directory.
        status: ``finished``, ``interrupted`` or ``failed``.
        exit_code: 0; 128 plus the number of the signal that ended the run; or 1 if the run failed
            or its last round could not be saved.
        rounds: summaries of this process's rounds, ``RoundSummary`` or ``GymSummary``.
        wall_seconds: duration of this process's training.
    """

    path: Path
    status: str
    exit_code: int
    rounds: list[Any]
    wall_seconds: float


def train_ppo_vectorized(
    config: TrainConfig | None = None,
    *,
    use_amp: bool = False,
    observer: Observer | None = None,
    **settings: Any,
) -> RunSummary:
    """Train a policy with PPO in a new run directory.

    For example ``train_ppo_vectorized(task="digits_shift", rounds=2, envs=8)``. The settings
    ``plugin`` and ``gym`` name code, which is executed.

    Args:
        config: settings to start from, the defaults if None.
        use_amp: true to compute hosts in mixed precision; false keeps what the settings say.
        observer: notified of every step and round.
        settings: single settings by name or alias, see ``leyline.config``; they override
            ``config``.

    Raises:
        UsageError: a setting is invalid.
    """
    complete = unflatten(settings, config)
    if use_amp:
        complete = unflatten({"use_amp": True}, complete)
    if complete.method.algorithm != "ppo":
        raise UsageError(f"algorithm: {complete.method.algorithm} is not PPO; use train_impala")
    return run_training(complete, "ppo", observer=observer, permission=_of_caller(complete))


def train_impala(
    config: TrainConfig | None = None, *, observer: Observer | None = None, **settings: Any
) -> RunSummary:
    """Train a policy with IMPALA in a new run directory.

    For example ``train_impala(task="digits_shift", rounds=2, envs=8, lag=1)``. The settings
    ``plugin`` and ``gym`` name code, which is executed.

    Args:
        config: settings to start from, the defaults of IMPALA if None.
        observer: notified of every step and round.
        settings: single settings by name or alias, see ``leyline.config``; they override
            ``config``.

    Raises:
        UsageError: a setting is invalid.
    """
    complete = unflatten({**settings, "algorithm": "impala"}, config)
    return run_training(complete, "impala", observer=observer, permission=_of_caller(complete))


def _of_caller(config: TrainConfig) -> Permission:
    """Permission for what the settings of the user's own program name."""
    return Permission(config.world.plugin, config.gymnasium.gym)


def resume_ppo(
    run: Path,
    settings: dict[str, Any],
    observer: Observer | None = None,
    permission: Permission = NOTHING,
) -> RunSummary:
    """Resume a run that learns by acting from its latest checkpoint.

    Args:
        run: the run directory.
        settings: settings given for the resume; only those marked ``on_resume`` may differ from the
            stored ones.
        observer: notified of every step and round.
        permission: see ``run_training``.

    Raises:
        UsageError: there is no such run, or a setting that may not change differs.
    """
    earlier, _ = stored_config(run)
    before = flatten(earlier)
    config = unflatten(settings, earlier)
    algorithm = earlier.method.algorithm
    if config.method.algorithm != algorithm:
        raise UsageError(
            f"resume: {run} learns by {algorithm}; resume it with esper train {algorithm}"
        )
    then = latest_identity(run)
    if then is not None:
        # Before anything is built: the tasks of another plugin, say, may not exist.
        check_same_run(run, then, identity_of(stored_id(run), earlier, {}), "plugin" in settings)
    fields = run_settings()
    for name, value in flatten(config).items():
        if value != before[name] and not about(fields[name]).on_resume:
            raise UsageError(
                f"{name}: the run has {before[name]}, and resuming cannot change it; omit it, or "
                "start a new run"
            )
    config.algorithm.check_resumed(earlier.algorithm)
    return run_training(config, algorithm, run, observer, permission=permission)


def run_training(
    config: TrainConfig,
    policy: str,
    resume: Path | None = None,
    observer: Observer | None = None,
    actor: Callable[[GrowthEnv], Actor] | None = None,
    permission: Permission = NOTHING,
) -> RunSummary:
    """Run rounds with ``policy``.

    Args:
        config: settings of the run.
        policy: the algorithm of ``config``, by which it learns; or
            ``heuristic``, ``rule``, ``random``, ``schedule`` or ``never``, which do not learn.
        resume: directory of a run to resume; None starts a new run.
        observer: notified of every step and round.
        actor: makes a policy that does not learn and is not one of Esper's; ``policy`` is what
            events and records call it.
        permission: without which plugins and the module of a Gymnasium id must have been loaded.

    Raises:
        UsageError: a setting is invalid; no run directory was created or changed.
    """
    begin = time.perf_counter()
    assert not learns_by_acting(policy) or policy == config.method.algorithm, policy
    check(config)
    if resume is None:
        config = with_horizons(config)
    check_sinks(config.output)
    devices = resolve_devices(config.machine.devices)
    device = devices[0]
    stop = StopSignal()
    plugins.load_all(config, permission, str(resume or "a setting"))
    trainee = _trainee(config, policy, devices, resume, stop, actor)
    # Up to here nothing has been written, so a signal may end the process at once.
    with stop.listening(), closing(trainee):
        fingerprint = machine_fingerprint(device, trainee.config, trainee.backend_name)
        announce_switches()
        directory, done = _open(trainee, resume, fingerprint)
        if learns_by_acting(policy):
            for line in schedule_ends(config.learner):
                notice(line)
        output = trainee.config.output
        session = Session(
            directory=directory,
            trainee=trainee,
            observer=observer or NullObserver(),
            stop=stop,
            identity=identity_of(stored_id(directory.path), trainee.config, trainee.data_digests),
            done=done,
            checkpoint_round=done if resume else None,
            records=RecordWriter(directory.path, output.record_last) if output.record else None,
        )
        try:
            with arithmetic(device, trainee.operation_threads, config.machine.tf32):
                rounds = session.run()
        except RuntimeError as error:
            full = memory_error(error)
            if full is None:
                raise
            raise what_fits(full, trainee.count, device) from error
        finally:
            directory.close()
    if trainee.agent is not None and config.output.telemetry_level == "debug":
        for line in gradient_counts(trainee.agent.policy):
            notice(line)
    seconds = time.perf_counter() - begin
    return RunSummary(directory.path, session.status, session.code, rounds, seconds)


def _trainee(
    config: TrainConfig,
    policy: str,
    devices: Sequence[torch.device],
    resume: Path | None,
    stop: StopSignal,
    actor: Callable[[GrowthEnv], Actor] | None,
) -> Trainee:
    """The trainee that the settings describe."""
    growth = config.gymnasium.gym is None
    if learns_by_acting(policy):
        elsewhere: Trainee | None = config.algorithm.trainee(config, devices[0], resume, stop.check)
        if elsewhere is not None:
            return elsewhere
    if growth:
        return GrowthTrainee(config, policy, devices, resume, actor)
    assert learns_by_acting(policy), "control policies act only in growth environments"
    return GymTrainee(config, devices[0])


def _open(
    trainee: Trainee, resume: Path | None, fingerprint: dict[str, Any]
) -> tuple[RunDirectory, int]:
    """A new run directory or the resumed one, and the number of its completed rounds."""
    config = trainee.config
    if resume is None:
        return RunDirectory.create(config, fingerprint), 0
    settings, then = stored_config(resume)
    directory = RunDirectory(resume)
    try:
        checkpoint = load_latest(resume)
        now = identity_of(stored_id(resume), settings, trainee.data_digests)
        # Other plugins are a setting of this resume, or were refused before they were run.
        check_same_run(resume, checkpoint.identity, now, plugins_given=True)
        if config.world.rounds <= checkpoint.round:
            raise UsageError(
                f"rounds: {resume} has {checkpoint.round} rounds already; give a larger total"
            )
        trainee.restore(checkpoint.parts)
        remove_records_after(resume, checkpoint.round)
        directory.cut_events(checkpoint.events_bytes, checkpoint.round)
        directory.note_resume(config, fingerprint)
    except UsageError:
        directory.abandon()
        raise
    warn_of_switches(checkpoint.identity, now)
    for difference in fingerprint_differences(then, fingerprint):
        notice(f"warning: results may differ in the last bits ({difference})")
    return directory, checkpoint.round
