"""The standard workload of the hot-path scripts, and the loop that runs it.

Actions are scripted: in every environment, a ``conv_light`` (in an MLP, the smallest blueprint)
germinates in the first slot at step 5 and is blended in as soon as its gates allow. The policy is
still computed, and learns from the actions it would have taken.
"""

import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from esper.kasmina.hosts.cnn import CnnHost
from esper.leyline.actions import BLUEPRINTS
from esper.leyline.config import LearnerConfig, TrainConfig
from esper.nissa.hub import Hub
from esper.nissa.sinks import JsonLines
from esper.runtime.data import Augmentation, Dataset
from esper.runtime.tasks import Task, find_all, task
from esper.simic.growth.agent import growth_agent
from esper.simic.growth.environment import GrowthEnv
from esper.simic.growth.step import GrowthConfig, Step
from esper.simic.rollout import Rollout
from esper.simic.run.run_directory import machine_fingerprint
from esper.simic.training.recorder import Recorder
from esper.simic.training.step_events import WatchedActor
from esper.tamiyo.fixed_schedule import Schedule, ScheduleActor
from esper.tamiyo.policy.features import Observation
from esper.tolaria.backends import Backend
from esper.tolaria.precision import Precision

P = ParamSpec("P")
T = TypeVar("T")

GERMINATION_STEP = 5
SEED = 1


def _pixels(validation: int, side: int = 32, channels: int = 3) -> Dataset:
    """Random images, of the shape of CIFAR-10's by default; there is nothing to learn."""
    generator = torch.Generator().manual_seed(0)

    def split(count: int) -> tuple[Tensor, Tensor]:
        images = torch.randn(count, side, side, channels, generator=generator)
        return images, torch.randint(10, (count,), generator=generator)

    return Dataset(*split(1024), *split(validation), *split(32), classes=10)


@task
def pixels() -> Task:
    """CIFAR-shaped pixels, shifted and mirrored, for a host of 8-16-32 channels."""
    return Task(
        name="pixels",
        summary="random pixels of CIFAR-10's shape",
        host=CnnHost((8, 16, 32), 10, (32, 32, 3), pools=3),
        data=lambda: _pixels(256),
        augmentation=Augmentation(reach=4, flip=True),
    )


def _wide(*channels: int) -> Task:
    return Task(
        name=f"wide_{channels[0]}",
        summary="random pixels of 8 by 8",
        host=CnnHost(channels, 10, (8, 8, 1), pools=1),
        data=lambda: _pixels(256, side=8, channels=1),
    )


@task
def wide_32() -> Task:
    """Images of 8 by 8 for a host of 32-64 channels."""
    return _wide(32, 64)


@task
def wide_128() -> Task:
    """Images of 8 by 8 for a host of 128-256 channels."""
    return _wide(128, 256)


@task
def pixels_tiny() -> Task:
    """CIFAR-shaped pixels for a host of 1-2-4 channels with 1x1 kernels."""
    return Task(
        name="pixels_tiny",
        summary="random pixels of CIFAR-10's shape",
        host=CnnHost((1, 2, 4), 10, (32, 32, 3), kernel=1, pools=3),
        data=lambda: _pixels(32),
        max_batches=2,
        batch_size=32,
    )


@dataclass(frozen=True)
class Workload:
    """The workload to run.

    Attributes:
        task: name of a task, possibly one of this file.
        envs: number of environments without twins.
        episode_length: steps of an episode.
        max_batches, batch_size: minibatches of a step and their size; the task's own when None.
        learning_rate: learning rate of hosts and seeds; the task's own when None.
        device: device of all tensors.
        precision: precision of the hosts.
        telemetry: telemetry level.
        threads: CPU threads.
        lstm_hidden, ppo_epochs: settings of the policy.
        seeds: number of slots per environment in which a seed lives.
        compile_mode: compilation of the policy's update, see ``simic.loss``.
        first: identity of the first environment.
        synchronised: whether the loop waits for a CUDA device before it reads a clock.
    """

    task: str = "digits_shift"
    envs: int = 64
    episode_length: int = 40
    max_batches: int | None = None
    batch_size: int | None = None
    learning_rate: float | None = None
    device: str = "cpu"
    precision: Precision = field(default_factory=lambda: Precision("cpu"))
    telemetry: str = "normal"
    threads: int = 2
    lstm_hidden: int = 128
    ppo_epochs: int = 4
    seeds: int = 1
    compile_mode: str = "off"
    first: int = 0
    synchronised: bool = True

    @property
    def clock(self) -> torch.device:
        """The device for which the loop waits before it reads a clock."""
        return torch.device(self.device if self.synchronised else "cpu")

    @property
    def found(self) -> Task:
        """The task."""
        (found,) = find_all([self.task])
        return replace(found, learning_rate=self.learning_rate or found.learning_rate)

    def growth(self, backend: str) -> GrowthConfig:
        """Return the settings of the environment."""
        return GrowthConfig(
            seed=SEED,
            episode_length=self.episode_length,
            max_batches=self.max_batches or self.found.max_batches,
            batch_size=self.batch_size or self.found.batch_size,
            one_at_a_time=False,
            backend=backend,
            threads=self.threads,
        )

    def script(self, envs: int) -> ScheduleActor:
        """Return the scripted actions."""
        slots = self.found.host.slots
        rows = Schedule.never(envs, len(slots))
        for s, slot in enumerate(slots[: self.seeds]):
            kind = BLUEPRINTS.index("conv_light")
            rows.start[:, s] = min(GERMINATION_STEP, self.episode_length // 3)
            rows.blueprint[:, s] = kind if kind in slot.kinds else slot.kinds[0]
        return ScheduleActor(rows)


def wait_for(device: torch.device) -> None:
    """Wait until a CUDA device has carried out what was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def machine(device: torch.device) -> dict[str, Any]:
    """Return the machine, versions and arithmetic on which figures depend."""
    found = machine_fingerprint(device, TrainConfig(), "")
    driver = None
    if device.type == "cuda":
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        with suppress(FileNotFoundError):
            asked = subprocess.run(query, capture_output=True, text=True, check=False)
            driver = asked.stdout.strip()
    else:
        found["device_name"] = f"{os.cpu_count()} x {found['device_name']}"
    return {name: found[name] for name in ("torch", "device_name", "cuda", "git")} | {
        "driver": driver,
        "tf32": device.type == "cuda" and torch.get_float32_matmul_precision() != "highest",
    }


def described(device: torch.device, workload: "Workload") -> str:
    """Return a line with the machine and the settings of a workload."""
    settings = {
        name: getattr(workload, name)
        for name in ("task", "envs", "episode_length", "device", "threads", "compile_mode")
    }
    parts = settings | {"amp": workload.precision.dtype_name} | machine(device)
    return ", ".join(f"{name} {value}" for name, value in parts.items() if value is not None)


class Timed:
    """A backend whose calls are timed until the device has carried them out."""

    def __init__(self, backend: Backend, device: torch.device):
        self.name, self.uses_all_threads, self.device = (
            backend.name,
            backend.uses_all_threads,
            device,
        )
        self.train_epoch = self._timed(backend.train_epoch)
        self.evaluate = self._timed(backend.evaluate)
        self.seconds = 0.0

    def _timed(self, call: Callable[P, T]) -> Callable[P, T]:
        def timed(*args: P.args, **kwargs: P.kwargs) -> T:
            wait_for(self.device)
            begin = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                wait_for(self.device)
                self.seconds += time.perf_counter() - begin

        return timed


class Loop:
    """The whole training loop with one backend, step by step.

    Args:
        workload: the workload to run.
        backend: name of the backend.
        instead: makes another backend for the host, which replaces the named one.
    """

    def __init__(
        self, workload: Workload, backend: str, instead: Callable[..., Backend] | None = None
    ):
        self.workload = workload
        self.device = device = torch.device(workload.device)
        self.environment = GrowthEnv(
            [workload.found],
            torch.arange(workload.first, workload.first + workload.envs),
            workload.growth(backend),
            workload.precision,
            device,
        )
        (key,) = self.environment.backends
        if instead is not None:
            self.environment.backends[key] = instead(workload.found.host)
        self.backend_name = type(self.environment.backends[key]).__name__
        learner = LearnerConfig(lstm_hidden=workload.lstm_hidden, ppo_epochs=workload.ppo_epochs)
        self.agent = growth_agent(learner, SEED, device, None, workload.compile_mode)
        self.folder = tempfile.TemporaryDirectory()
        sink = JsonLines(Path(self.folder.name))
        self.hub = Hub([] if workload.telemetry == "off" else [sink], workload.telemetry)
        self.held = ExitStack()
        self.episode = 0
        self.lanes = 1
        self.clear()

    def clear(self) -> None:
        """Reset all timings."""
        self.steps: list[float] = []
        self.host, self.policy, self.update = 0.0, 0.0, 0.0

    def begin(self) -> None:
        """Begin a new episode."""
        self.observation: Observation = self.environment.reset(self.episode)
        shards = self.environment.shards
        self.lanes = len(shards)
        for shard in shards:
            if not isinstance(shard.engine.backend, Timed):
                shard.engine.backend = Timed(shard.engine.backend, self.workload.clock)
        self.script = self.workload.script(self.environment.count)
        for actor in (self.agent, self.script):
            actor.begin(self.environment.environments, self.episode)
        self.held.enter_context(self.agent.policy.frozen_weights())
        self.actor = WatchedActor(self.agent)
        self.recorder = Recorder(self.hub, self.environment, self.episode)
        self.rollout: Rollout[Observation] | None = None
        self.t = 0

    def step(self) -> Step:
        """Take one environment step."""
        before = self._host_seconds()
        begin = time.perf_counter()
        chosen, log_prob, value = self.actor.act(self.observation, self.t)
        self._wait()
        acted = time.perf_counter()
        length = self.workload.episode_length
        self.rollout = self.rollout or Rollout(length, self.observation, chosen)
        self.rollout.write(self.t, self.observation, chosen, log_prob, value)
        actions = self.script.act(self.observation, self.t)[0]
        step = self.environment.step(actions)
        self.rollout.outcome(self.t, step.reward, step.done)
        self.recorder.step(self.t, actions, step, self.actor.last)
        self._wait()
        self.steps.append(time.perf_counter() - begin)
        self.policy += acted - begin
        self.host += (self._host_seconds() - before) / self.lanes
        self.observation = step.observation
        self.t += 1
        return step

    def play(self, steps: int) -> None:
        """Take so many steps of an episode that has begun."""
        for _ in range(steps):
            self.step()

    def play_episode(self) -> None:
        """Take all steps of an episode that has begun, then update."""
        self.play(self.workload.episode_length)
        self.end()

    def end(self) -> None:
        """Update the policy, and write the events of the round."""
        assert self.rollout is not None
        self.held.close()
        begin = time.perf_counter()
        metrics = self.agent.update(self.rollout)
        self.recorder.finish(0.0, metrics)
        self.hub.flush()
        self._wait()
        self.update += time.perf_counter() - begin
        self.episode += 1

    def close(self) -> None:
        """Stop the telemetry."""
        self.held.close()
        self.hub.close()
        self.folder.cleanup()

    @property
    def seconds(self) -> float:
        """Total of all timings."""
        return sum(self.steps) + self.update

    def _host_seconds(self) -> float:
        backends = (shard.engine.backend for shard in self.environment.shards)
        return sum(backend.seconds for backend in backends if isinstance(backend, Timed))

    def _wait(self) -> None:
        wait_for(self.workload.clock)
