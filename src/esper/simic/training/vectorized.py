"""Training a growth policy: rounds of episodes of N environments, one PPO update a round."""

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
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
    number,
)
from esper.nissa.hub import Hub, JsonLines
from esper.nissa.parquet import write_parquet
from esper.simic.checkpoint import agent_parts, load_latest, restore_agent, save, sync
from esper.simic.environment import GrowthEnv
from esper.simic.ppo import PPOAgent
from esper.simic.rollout import Actor, collect
from esper.simic.run_directory import (
    RunDirectory,
    fingerprint_differences,
    machine_fingerprint,
    stored_config,
)
from esper.simic.step import Step
from esper.simic.training.recorder import Recorder, RoundSummary
from esper.simic.training.setup import build_environment, control, resolve_device, resolved
from esper.tolaria.precision import Precision

MAY_CHANGE_ON_RESUME = frozenset(
    {
        "rounds",
        "device",
        "threads",
        "plugin",
        "telemetry_dir",
        "telemetry_level",
        "checkpoint_every",
        "keep_checkpoints",
    }
)
"""Settings that a resumed run may give anew."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What a run ended with.

    Attributes:
        path: its directory.
        status: ``finished`` or ``interrupted``.
        exit_code: 0, or 128 plus the signal that ended it.
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
    environment = build_environment(config, device)
    config = resolved(config, environment)
    agent = PPOAgent(config.learner, config.world.seed, device) if policy == "ppo" else None
    actor = agent or control(policy, environment)
    directory, done = _open(config, resume, agent, device)
    session = _Session(
        config,
        directory,
        environment,
        actor,
        agent,
        environment.precision,
        observer or Unobserved(),
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
    config: TrainConfig, resume: Path | None, agent: PPOAgent | None, device: torch.device
) -> tuple[RunDirectory, int]:
    """A new run directory, or the one to go on with; and the rounds it has done."""
    fingerprint = machine_fingerprint(device, config)
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
    except UsageError:
        directory.close()
        raise
    directory.note_resume(config, fingerprint)
    for difference in fingerprint_differences(then, fingerprint):
        print(f"warning: results may differ in the last bits, {difference}", file=sys.stderr)
    directory.cut_events(checkpoint.events_bytes, checkpoint.round)
    return directory, checkpoint.round


class _Stopped(Exception):
    """A signal asked the run to end."""


@dataclass(slots=True)
class _Session:
    """One process of a run."""

    config: TrainConfig
    directory: RunDirectory
    environment: GrowthEnv
    actor: Actor
    agent: PPOAgent | None
    precision: Precision
    observer: Observer
    saved: int | None = None
    events_bytes: int = 0
    stop_signal: int | None = None

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
            with self._listening():
                try:
                    for number in range(done + 1, total + 1):
                        summaries.append(self._round(hub, number))
                        if number % self.config.output.checkpoint_every == 0 or number == total:
                            self._save(hub, number)
                        if self.stop_signal is not None and number < total:
                            raise _Stopped
                except _Stopped:
                    assert self.stop_signal is not None
                    status, code = "interrupted", 128 + self.stop_signal
                    # Only a rollout was cut short: the weights are those of the last whole round.
                    self._save(hub, done + len(summaries))
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
            if self.stop_signal is not None and not step.done:
                raise _Stopped

        begin = time.perf_counter()
        rollout = collect(self.environment, self.actor, index, on_step)
        collected = time.perf_counter()
        metrics = self.agent.update(rollout) if self.agent else {}
        end = time.perf_counter()

        steps = self.environment.count * self.environment.config.episode_length
        if self.agent:
            event = PPOUpdateCompleted(
                time=time.time(),
                round=index,
                update=self.agent.updates,
                metrics={name: number(value) for name, value in metrics.items()},
            )
            hub.emit(event)
        amp_dtype = self.precision.amp_dtype
        hub.emit(
            AnalyticsSnapshot(
                time=time.time(),
                round=index,
                amp_enabled=self.precision.enabled,
                amp_dtype=str(amp_dtype).removeprefix("torch.") if amp_dtype else None,
                learning_rate=metrics.get("learning_rate"),
                environment_steps_per_second=steps / (end - begin),
                rollout_seconds=collected - begin,
                update_seconds=end - collected,
            )
        )
        summary = recorder.finish(steps / (end - begin), metrics)
        self._note_events(hub)
        self.observer.round_done(summary)
        return summary

    def _save(self, hub: Hub, number: int) -> None:
        """A checkpoint of round ``number``, unless it has one."""
        if self.agent is None or number == self.saved:
            return
        if self.directory.events.exists():
            sync(self.directory.events)
        keep = self.config.output.keep_checkpoints
        parts = agent_parts(self.agent)
        path = save(self.directory.path, number, parts, self.events_bytes, keep)
        self.saved = number
        relative = str(path.relative_to(self.directory.path))
        hub.emit(CheckpointSaved(time=time.time(), round=number, path=relative))

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """SIGINT and SIGTERM end the run at the next step; a second one ends it at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {known: signal.getsignal(known) for known in (signal.SIGINT, signal.SIGTERM)}

        def note(number: int, frame: FrameType | None) -> None:
            self.stop_signal = number
            for known, handler in before.items():
                signal.signal(known, handler)

        for known in before:
            signal.signal(known, note)
        try:
            yield
        finally:
            for known, handler in before.items():
                signal.signal(known, handler)
