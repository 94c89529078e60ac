"""Training a growth policy: rounds of episodes of N environments, one PPO update a round."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pyarrow
import torch
from torch import Tensor

from esper.leyline.config import TrainConfig, check, flatten, unflatten
from esper.leyline.errors import UsageError
from esper.leyline.events import (
    SCHEMA_VERSION,
    AnalyticsSnapshot,
    CheckpointSaved,
    PPOUpdateCompleted,
    TrainingFinished,
    TrainingStarted,
    UpdateRefused,
    number,
)
from esper.nissa.hub import Hub, JsonLines
from esper.nissa.parquet import write_parquet
from esper.simic.checkpoint import agent_parts, load_latest, restore_agent, save
from esper.simic.disk import sync
from esper.simic.environment import GrowthEnv
from esper.simic.optimiser import GROUPS
from esper.simic.ppo import PPOAgent
from esper.simic.replay import write_refusal
from esper.simic.rollout import Actor, collect
from esper.simic.run_directory import (
    RunDirectory,
    fingerprint_differences,
    machine_fingerprint,
    stored_config,
)
from esper.simic.step import Step
from esper.simic.training.recorder import Recorder, RoundSummary
from esper.simic.training.setup import (
    build_agent,
    build_environment,
    control,
    resolve_device,
    resolved,
)
from esper.simic.training.signals import StopSignal
from esper.tamiyo.policy.features import Observation
from esper.tolaria.precision import Precision, resolve_precision

MAY_CHANGE_ON_RESUME = frozenset(
    {
        "rounds",
        "device",
        "backend",
        "threads",
        "plugin",
        "telemetry_dir",
        "telemetry_level",
        "checkpoint_every",
        "keep_checkpoints",
    }
)
"""Settings that a resumed run may give anew."""


MOST_REFUSALS = 3
"""Updates in a row that may meet numbers that are not finite before the run stops."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What a run ended with.

    Attributes:
        path: its directory.
        status: ``finished``, ``interrupted`` or ``failed``.
        exit_code: 0, 128 plus the signal that ended it, or 1 where it failed or the last round
            could not be saved.
        rounds: those of this process.
        wall_seconds: of this process.
    """

    path: Path
    status: str
    exit_code: int
    rounds: list[RoundSummary]
    wall_seconds: float


class Observer(Protocol):
    """Someone who watches a run."""

    def started(self, path: Path, config: TrainConfig, done: int, steps_per_round: int) -> None:
        """Training begins, ``done`` rounds having been trained before."""
        ...

    def stepped(self, step: Step) -> None:
        """An environment step is done."""
        ...

    def round_done(self, summary: RoundSummary) -> None:
        """A round is done."""
        ...


class Unobserved:
    """Nobody watches."""

    def started(self, path: Path, config: TrainConfig, done: int, steps_per_round: int) -> None:
        """See ``Observer``."""

    def stepped(self, step: Step) -> None:
        """See ``Observer``."""

    def round_done(self, summary: RoundSummary) -> None:
        """See ``Observer``."""


def train_ppo_vectorized(
    config: TrainConfig | None = None,
    *,
    use_amp: bool = False,
    observer: Observer | None = None,
    **settings: Any,
) -> RunSummary:
    """Train a policy with PPO in a new run directory.

    ``train_ppo_vectorized(task="digits_shift", rounds=2, envs=8)`` sets single settings by the
    names of their flags; see ``leyline.config``.

    Args:
        config: settings to start from, the defaults when None.
        use_amp: mixed precision for the hosts.
        observer: is told of every step and round.
        settings: single settings, aliases included.

    Raises:
        UsageError: a setting is at fault.
    """
    complete = unflatten(settings, config)
    if use_amp:
        complete = unflatten({"use_amp": True}, complete)
    return run_training(complete, "ppo", observer=observer)


def resume_ppo(run: Path, settings: dict[str, Any], observer: Observer | None = None) -> RunSummary:
    """Go on with a run from its latest checkpoint.

    Args:
        run: its directory.
        settings: what the user gave anew; only ``MAY_CHANGE_ON_RESUME`` may differ.
        observer: is told of every step and round.

    Raises:
        UsageError: there is no such run, or a setting may not change.
    """
    stored, _ = stored_config(run)
    before = flatten(stored)
    config = unflatten(settings, stored)
    for name, value in flatten(config).items():
        if value != before[name] and name not in MAY_CHANGE_ON_RESUME:
            raise UsageError(f"{name}: the run has {before[name]}, and resuming cannot change it")
    return run_training(config, "ppo", resume=run, observer=observer)


def run_training(
    config: TrainConfig,
    policy: str,
    resume: Path | None = None,
    observer: Observer | None = None,
) -> RunSummary:
    """Run rounds with ``policy``: ``ppo`` learns; ``heuristic``, ``random`` and ``never`` do not.

    Raises:
        UsageError: a setting is at fault; no run directory was made or changed.
    """
    begin = time.perf_counter()
    check(config)
    device = resolve_device(config.machine.device)
    precision = resolve_precision(config.machine.use_amp, device)
    if precision.reason:
        print(f"warning: use_amp: {precision.reason}; running in float32", file=sys.stderr)
    environment = build_environment(config, precision, device)
    config = resolved(config, environment)
    agent = build_agent(config, device) if policy == "ppo" else None
    actor = agent or control(policy, environment)
    stop = StopSignal()
    # Until here nothing is written, and a signal ends the process at once.
    with stop.listening():
        fingerprint = machine_fingerprint(device, config, environment.backend_name)
        directory, done = _open(config, resume, agent, fingerprint)
        session = _Session(
            config,
            directory,
            environment,
            actor,
            agent,
            precision,
            observer or Unobserved(),
            stop,
            saved=done if resume else None,
        )
        try:
            with _single_threaded(device):
                status, code, rounds = session.run(done, policy)
        finally:
            directory.close()
    return RunSummary(directory.path, status, code, rounds, time.perf_counter() - begin)


@contextmanager
def _single_threaded(device: torch.device) -> Iterator[None]:
    """Operations of one thread on a CPU: the shards are what runs side by side."""
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _open(
    config: TrainConfig,
    resume: Path | None,
    agent: PPOAgent[Observation] | None,
    fingerprint: dict[str, Any],
) -> tuple[RunDirectory, int]:
    """A new run directory, or the one to go on with; and the rounds it has done."""
    if resume is None:
        return RunDirectory.create(config, fingerprint), 0
    assert agent is not None, "only a learned policy is resumed"
    _, then = stored_config(resume)
    directory = RunDirectory(resume)
    try:
        checkpoint = load_latest(resume)
        if config.world.rounds <= checkpoint.round:
            raise UsageError(
                f"rounds: {resume} has {checkpoint.round} rounds already; give a larger total"
            )
        restore_agent(agent, checkpoint.parts)
        directory.cut_events(checkpoint.events_bytes, checkpoint.round)
        directory.note_resume(config, fingerprint)
    except UsageError:
        directory.abandon()
        raise
    for difference in fingerprint_differences(then, fingerprint):
        print(f"warning: results may differ in the last bits, {difference}", file=sys.stderr)
    return directory, checkpoint.round


class _Stopped(Exception):
    """A signal asked the run to end."""


class _Refused(Exception):
    """Too many updates in a row met numbers that are not finite."""

    def __str__(self) -> str:
        return (
            f"{MOST_REFUSALS} updates in a row met numbers that are not finite; the run stops, "
            "its checkpoint and the files under refused/ are kept"
        )


@dataclass(slots=True)
class _Session:
    """One process of a run."""

    config: TrainConfig
    directory: RunDirectory
    environment: GrowthEnv
    actor: Actor
    agent: PPOAgent[Observation] | None
    precision: Precision
    observer: Observer
    stop: StopSignal
    saved: int | None = None
    events_bytes: int = 0
    refusals: int = 0

    def run(self, done: int, policy: str) -> tuple[str, int, list[RoundSummary]]:
        """Rounds ``done + 1`` to the total. Returns status, exit code and summaries."""
        total = self.config.world.rounds
        level = self.config.output.telemetry_level
        sinks = [JsonLines(self.directory.events)] if level != "off" else []
        hub = Hub(sinks, level)
        summaries: list[RoundSummary] = []
        status, code = "finished", 0
        try:
            self._announce(hub, done, policy)
            try:
                for number in range(done + 1, total + 1):
                    if self.stop.number is not None:
                        raise _Stopped
                    summaries.append(self._round(hub, number))
                    if number % self.config.output.checkpoint_every == 0 or number == total:
                        self._save(hub, number)
                    # Only now: what was told of is not lost when the process dies.
                    self.observer.round_done(summaries[-1])
                    if self.refusals == MOST_REFUSALS:
                        raise _Refused
            except _Stopped:
                assert self.stop.number is not None
                status, code = "interrupted", 128 + self.stop.number
                # Only a rollout was cut short: the weights are those of the last whole round.
                self._save(hub, done + len(summaries))
            except _Refused as error:
                print(f"esper: {error}", file=sys.stderr)
                status, code = "failed", 1
                self._save(hub, done + len(summaries))
            if self.agent is not None and self.saved != done + len(summaries):
                code = 1
            hub.emit(TrainingFinished(time=time.time(), round=done + len(summaries), status=status))
        finally:
            hub.close()
        self._write_parquet()
        return status, code, summaries

    def _write_parquet(self) -> None:
        if not self.directory.events.exists():
            return
        try:
            write_parquet(self.directory.events, self.directory.path / "events.parquet")
        except (OSError, pyarrow.ArrowException) as error:
            print(f"warning: events.parquet could not be written ({error})", file=sys.stderr)

    def _announce(self, hub: Hub, done: int, policy: str) -> None:
        world, growth = self.config.world, self.environment.config
        hub.emit(
            TrainingStarted(
                time=time.time(),
                schema=SCHEMA_VERSION,
                round=done,
                rounds=world.rounds,
                tasks=[task.name for task in self.environment.tasks],
                policy=policy,
                envs=world.envs,
                group_size=world.group_size,
                episode_length=growth.episode_length,
                slots=[[s.name for s in task.host.slots] for task in self.environment.tasks],
                host_parameters=[task.host.parameter_count for task in self.environment.tasks],
                device=self.config.machine.device,
                amp_enabled=self.precision.enabled,
            )
        )
        self._note_events(hub)
        self.observer.started(self.directory.path, self.config, done, growth.episode_length)

    def _note_events(self, hub: Hub) -> None:
        """Remember how long the event file is now that a whole number of rounds is told."""
        hub.flush()
        events = self.directory.events
        self.events_bytes = events.stat().st_size if events.exists() else 0

    def _round(self, hub: Hub, index: int) -> RoundSummary:
        recorder = Recorder(hub, self.environment, index)

        def on_step(t: int, actions: Tensor, step: Step) -> None:
            recorder.step(t, actions, step)
            self.observer.stepped(step)
            if self.stop.number is not None and not step.done:
                raise _Stopped

        begin = time.perf_counter()
        rollout = collect(self.environment, self.actor, index, on_step)
        collected = time.perf_counter()
        metrics: dict[str, float | None] = self.agent.update(rollout) if self.agent else {}
        end = time.perf_counter()

        steps = self.environment.count * self.environment.config.episode_length
        if self.agent:
            event = PPOUpdateCompleted(
                time=time.time(),
                round=index,
                update=self.agent.updates,
                metrics={n: None if v is None else number(v) for n, v in metrics.items()},
            )
            hub.emit(event)
            self._note_refusal(hub, index)
        amp_dtype = self.precision.amp_dtype
        hub.emit(
            AnalyticsSnapshot(
                time=time.time(),
                round=index,
                amp_enabled=self.precision.enabled,
                amp_dtype=str(amp_dtype).removeprefix("torch.") if amp_dtype else None,
                learning_rate=metrics.get("learning_rate"),
                learning_rates={
                    group: rate
                    for group in GROUPS
                    if (rate := metrics.get(f"learning_rate/{group}")) is not None
                },
                amp_policy=self.agent is not None and self.agent.policy.amp_dtype is not None,
                amp_scale=metrics.get("amp_scale"),
                environment_steps_per_second=steps / (end - begin),
                rollout_seconds=collected - begin,
                update_seconds=end - collected,
            )
        )
        summary = recorder.finish(steps / (end - begin), metrics)
        self._note_events(hub)
        return summary

    def _note_refusal(self, hub: Hub, index: int) -> None:
        """Tell of an update that was refused, and keep what is needed to replay it."""
        assert self.agent is not None
        if self.agent.refusal is None:
            self.refusals = 0
            return
        self.refusals += 1
        path = write_refusal(self.directory.path, index, self.agent, flatten(self.config))
        relative = str(path.relative_to(self.directory.path))
        tensor = self.agent.refusal.tensor
        hub.emit(
            UpdateRefused(
                time=time.time(),
                round=index,
                tensor=tensor,
                file=relative,
                in_a_row=self.refusals,
            )
        )
        print(
            f"warning: round {index} taught nothing, {tensor} is not finite; "
            f"esper replay {path} shows it again",
            file=sys.stderr,
        )

    def _save(self, hub: Hub, number: int) -> None:
        """A checkpoint of round ``number``, unless it has one.

        Where it cannot be written training goes on: the earlier ones stay, and the next one may
        find room.
        """
        if self.agent is None or number == self.saved:
            return
        keep = self.config.output.keep_checkpoints
        parts = agent_parts(self.agent)
        try:
            if self.directory.events.exists():
                sync(self.directory.events)
            path = save(self.directory.path, number, parts, self.events_bytes, keep)
        except OSError as error:
            print(
                f"warning: checkpoint: round {number} was not saved ({error.strerror}); "
                "earlier checkpoints stay",
                file=sys.stderr,
            )
            return
        self.saved = number
        relative = str(path.relative_to(self.directory.path))
        hub.emit(CheckpointSaved(time=time.time(), round=number, path=relative))
