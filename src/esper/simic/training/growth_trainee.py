"""The trainee of a growth run: growth environments and their policy."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from esper.leyline.actions import BLUEPRINTS
from esper.leyline.config import TrainConfig
from esper.leyline.config.algorithm import learns_by_acting
from esper.leyline.errors import UsageError
from esper.leyline.events import SCHEMA_VERSION, TrainingStarted
from esper.nissa.hub import Hub
from esper.runtime.tasks import Task
from esper.simic.growth.collect import collect
from esper.simic.growth.environment import GrowthEnv
from esper.simic.growth.layout import GrowthLayout
from esper.simic.growth.step import Step
from esper.simic.ppo import PPOAgent
from esper.simic.records.record_columns import RoundRecord
from esper.simic.rollout import Rollout
from esper.simic.run.checkpoint import agent_parts, latest_features, restore_agent
from esper.simic.training.decisions import WatchedActor
from esper.simic.training.recorder import Recorder, RoundSummary
from esper.simic.training.setup import build_agent, build_environment, complete_config, control
from esper.simic.training.trainee import AnyStep
from esper.simic.training.warm_start import initial_checkpoint
from esper.tamiyo.baselines import Actor
from esper.tamiyo.policy.features import Observation
from esper.tolaria.precision import Precision


class GrowthRounds:
    """What a run on growing networks tells of its rounds, wherever the hosts are.

    Attributes:
        layout: the environments and their tasks.
        policy, agent, recorder: the name of the policy, its learner, and the events of the round.
    """

    operation_threads = 1
    """One thread per operation, because shards run in parallel."""

    config: TrainConfig
    layout: GrowthLayout
    policy: str
    precision: Precision
    recorder: Recorder
    agent: PPOAgent[Observation] | None

    @property
    def steps(self) -> int:
        """See ``Trainee``."""
        return self.layout.config.episode_length

    @property
    def count(self) -> int:
        """See ``Trainee``."""
        return self.layout.count

    @property
    def data_digests(self) -> dict[str, str]:
        """See ``Trainee``; empty where the processes of actors make the data."""
        return self.layout.data_digests if isinstance(self.layout, GrowthEnv) else {}

    def start_event(self, time: float, done: int) -> TrainingStarted:
        """See ``Trainee.start_event``."""
        world = self.config.world
        tasks: dict[str, Task] = {}
        for task in self.layout.tasks:
            tasks.setdefault(task.label, task)
        return TrainingStarted(
            time=time,
            schema=SCHEMA_VERSION,
            round=done,
            rounds=world.rounds,
            tasks=list(tasks),
            policy=self.policy,
            envs=world.envs,
            group_size=world.group_size,
            episode_length=self.steps,
            slots=[[slot.name for slot in task.host.slots] for task in tasks.values()],
            host_parameters=[task.host.parameter_count for task in tasks.values()],
            device=" ".join(self.config.machine.devices),
            amp_enabled=self.precision.enabled,
            amp_dtype=self.precision.dtype_name,
            blueprints=list(BLUEPRINTS),
            level=self.config.output.telemetry_level,
            split_seed=world.split_seed,
            amp_policy_dtype=None if self.agent is None else self.agent.policy.amp_dtype_name,
        )

    def record(self, number: int, rollout: Rollout[Observation]) -> RoundRecord:
        """See ``Trainee.record``."""
        environment, agent, values = self.layout, self.agent, None
        if agent is not None and agent.actor is agent and not rollout.lag:
            # The moments of an older policy's values are not known any more.
            values = agent.return_moments.restore(rollout.values)
        return RoundRecord(
            round=number,
            policy=self.policy,
            rollout=rollout,
            environments=environment.environments,
            twins=environment.groups,
            tasks=environment.current_tasks,
            values=values,
            twin_scores=self.recorder.twin_scores,
        )

    def finish(
        self, hub: Hub, number: int, steps_per_second: float, metrics: dict[str, float | None]
    ) -> RoundSummary:
        """See ``Trainee.finish``."""
        return self.recorder.finish(steps_per_second, metrics)


class GrowthTrainee(GrowthRounds):
    """Growth environments in this process and the policy that acts in them; see ``Trainee``.

    Args:
        config: settings of the run.
        policy: an algorithm; or one of ``control``, which do not learn.
        devices: devices over which the hosts are distributed; the policy is on the first.
        resume: the run that ``restore`` continues, whose policy's features are observed; None for
            a new run.
        actor: makes a policy that does not learn, instead of the control called ``policy``.

    Raises:
        UsageError: a setting is invalid.
    """

    def __init__(
        self,
        config: TrainConfig,
        policy: str,
        devices: Sequence[torch.device],
        resume: Path | None = None,
        actor: Callable[[GrowthEnv], Actor] | None = None,
    ):
        self.policy = policy
        self.environment = self.layout = build_environment(config, devices)
        self.precision = self.environment.precision
        self.backend_name = self.environment.backend_name
        # Before paths are resolved: a wrong one is refused here.
        if config.learner.initial_policy is not None and not learns_by_acting(policy):
            raise UsageError(f"initial_policy: {policy} does not learn; leave this setting out")
        initial = None if resume else initial_checkpoint(config)
        self.config = complete_config(config, self.environment, self.backend_name)
        self.agent = None
        if learns_by_acting(policy):
            features = latest_features(resume) if resume else None
            self.agent = build_agent(self.config, devices[0], initial, features)
        make = actor or partial(control, policy)
        self.actor: Actor = self.agent.actor if self.agent else make(self.environment)

    def amp_scale(self) -> float | None:
        """See ``Trainee.amp_scale``."""
        return self.environment.amp.least_scale

    def collect(
        self, hub: Hub, number: int, on_step: Callable[[AnyStep], None]
    ) -> Rollout[Observation]:
        """See ``Trainee.collect``."""
        actor = WatchedActor(self.actor)
        self.recorder = Recorder(hub, self.environment, number, actor)

        def note_step(t: int, actions: Tensor, step: Step) -> None:
            self.recorder.step(t, actions, step)
            on_step(step)

        with self.agent.actor.policy.frozen_weights() if self.agent else nullcontext():
            return collect(self.environment, actor, number, note_step)

    def parts(self) -> dict[str, dict[str, Any]]:
        """See ``Trainee.parts``. Every round has new hosts, so only their loss scales are saved."""
        assert self.agent is not None, "only a learned policy is saved"
        return agent_parts(self.agent) | {"environment": self.environment.state()}

    def restore(self, parts: dict[str, dict[str, Any]]) -> None:
        """See ``Trainee.restore``."""
        assert self.agent is not None, "only a learned policy is resumed"
        restore_agent(self.agent, parts)
        self.environment.load_state(parts.get("environment", {}))

    def close(self) -> None:
        """See ``Trainee.close``."""
