"""The trainees of growth runs, with their environments in this process or in those of actors."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from esper.kasmina.transfer import CPU
from esper.leyline.actions import BLUEPRINTS
from esper.leyline.config import TrainConfig
from esper.leyline.config.algorithm import learns_by_acting
from esper.leyline.errors import UsageError
from esper.leyline.notices import notice
from esper.nissa.hub import Hub
from esper.runtime.tasks import Task
from esper.simic.distributed.cluster import ActorSettings
from esper.simic.distributed.remote_actors import RemoteActors
from esper.simic.distributed.wire import element, stack
from esper.simic.growth.agent import GrowthMoments
from esper.simic.growth.collect import collect
from esper.simic.growth.environment import GrowthEnv
from esper.simic.growth.layout import GrowthLayout, merge
from esper.simic.growth.step import Step, StepReport
from esper.simic.impala import load_snapshot, snapshot
from esper.simic.ppo import PPOAgent
from esper.simic.records.record_columns import RoundRecord
from esper.simic.rollout import Rollout
from esper.simic.run.checkpoint import latest_features
from esper.simic.training.actor_specs import (
    ActorSpec,
    Data,
    actor_specs,
    concatenation,
    data_from_files,
    joined_rollout,
    with_data,
)
from esper.simic.training.recorder import Recorder, RoundSummary
from esper.simic.training.setup import (
    build_agent,
    build_environment,
    complete_config,
    control,
    growth_config,
    initial_checkpoint,
    policy_dtype,
    resolve_tasks,
)
from esper.simic.training.step_events import Decision, WatchedActor
from esper.simic.training.trainee import AnyStep, Trainee
from esper.tamiyo.baselines import Actor
from esper.tamiyo.policy.action_masks import ActionMasks
from esper.tamiyo.policy.factored_lstm import FactoredLSTM
from esper.tamiyo.policy.features import Observation
from esper.tamiyo.policy.interface import RecurrentState

STEPS_AT_ONCE = 64
"""Steps of a delivered episode after which the sinks are waited for: their queue is bounded, and
steps that do not fit are dropped."""


class GrowthRounds(Trainee):
    """What a run on growing networks tells of its rounds, wherever the hosts are.

    Every episode begins with new hosts, so a checkpoint has little of them.

    Attributes:
        layout: the environments and their tasks.
        recorder: the events of the round.
    """

    layout: GrowthLayout
    recorder: Recorder
    agent: PPOAgent[Observation] | None

    @property
    def steps(self) -> int:
        """See ``Trainee``."""
        return self.layout.config.episode_length

    def description(self) -> dict[str, Any]:
        """See ``Trainee.description``."""
        tasks: dict[str, Task] = {}
        for task in self.layout.tasks:
            tasks.setdefault(task.label, task)
        return {
            "tasks": list(tasks),
            "group_size": self.config.world.group_size,
            "slots": [[slot.name for slot in task.host.slots] for task in tasks.values()],
            "host_parameters": [task.host.parameter_count for task in tasks.values()],
            "device": " ".join(self.config.machine.devices),
            "blueprints": list(BLUEPRINTS),
            "split_seed": self.config.world.split_seed,
        }

    def record(self, number: int, rollout: Rollout[Observation]) -> RoundRecord:
        """See ``Trainee.record``."""
        environment = self.layout
        return RoundRecord(
            round=number,
            policy=self.policy,
            rollout=rollout,
            environments=environment.environments,
            twins=environment.groups,
            tasks=environment.current_tasks,
            values=self.known_values(rollout),
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

    @property
    def data_digests(self) -> dict[str, str]:
        """See ``Trainee``."""
        return self.environment.data_digests

    def amp_scale(self) -> float | None:
        """See ``Trainee.amp_scale``."""
        return self.environment.amp.least_scale

    def collect(
        self, hub: Hub, number: int, on_step: Callable[[AnyStep], None]
    ) -> Rollout[Observation]:
        """See ``Trainee.collect``."""
        actor = WatchedActor(self.actor)
        self.recorder = Recorder(hub, self.environment, number)

        def note_step(t: int, actions: Tensor, step: Step) -> None:
            self.recorder.step(t, actions, step, actor.last)
            on_step(step)

        with self.agent.actor.policy.frozen_weights() if self.agent else nullcontext():
            return collect(self.environment, actor, number, note_step)

    def environment_parts(self) -> dict[str, dict[str, Any]]:
        """See ``Trainee.environment_parts``: the loss scales of the hosts."""
        return {"environment": self.environment.state()}

    def restore_environments(self, parts: dict[str, dict[str, Any]]) -> None:
        """See ``Trainee.restore_environments``."""
        self.environment.load_state(parts.get("environment", {}))

    def close(self) -> None:
        """See ``Trainee.close``."""


@dataclass(slots=True)
class StepTelemetry:
    """Telemetry of an episode's steps, ``[N, T, ...]``.

    Attributes:
        reward: rewards as the environment gave them.
        report: see ``Step``.
        ops: probability of each op.
    """

    reward: Tensor
    report: StepReport
    ops: Tensor


class GrowthShard:
    """Growth environments in the process of an actor; see ``Shard``.

    Args:
        spec: what to build.
        data: data of tasks, see ``data_from_files``.
    """

    def __init__(self, spec: ActorSpec, data: dict[str, Data]):
        config = spec.config()
        tasks = with_data(resolve_tasks(config), data)
        identities = torch.arange(spec.begin, spec.end)
        self.environment = build_environment(config, [CPU], tasks, identities)
        # All groups of the run: the widest task that one of them draws sets the width of the noise.
        settings = self.environment.config
        self.everyone = GrowthLayout(tasks, torch.arange(spec.total), settings, CPU)
        self.policy = FactoredLSTM(config.learner.lstm_hidden, features=spec.features)
        self.policy.amp_dtype = policy_dtype(config, CPU)
        self.actor = spec.actor(self.policy, GrowthMoments(CPU, spec.features), config.world.seed)

    def describe(self) -> dict[str, Any]:
        """See ``Shard.describe``: the backend and the precision in use."""
        environment = self.environment
        return {"backend": environment.backend_name, "precision": environment.precision}

    def collect(self, number: int, weights: dict[str, Any], before: Any) -> tuple[Any, Any]:
        """See ``Shard.collect``. Every episode begins with new hosts, so nothing is kept."""
        load_snapshot(self.actor, weights)
        self.everyone.draw_tasks(number)
        slots = {len(task.host.slots) for task in self.everyone.current_tasks}
        self.actor.least_options = max(slots)
        hidden: list[RecurrentState] = []
        steps: list[Step] = []

        def note_step(t: int, actions: Tensor, step: Step) -> None:
            hidden.append(self.actor.hidden)
            steps.append(step)

        with self.actor.policy.frozen_weights():
            rollout = collect(self.environment, self.actor, number, note_step)
        ops = self._op_probabilities(hidden, rollout.observation.masks)
        telemetry = [StepTelemetry(s.reward, s.report, ops[t]) for t, s in enumerate(steps)]
        result = {
            "rollout": rollout.state(),
            "telemetry": stack(telemetry),
            "after": steps[-1].observation.tensors(),
        }
        return result, None

    def _op_probabilities(self, hidden: list[RecurrentState], masks: ActionMasks) -> list[Tensor]:
        """The probability of each op in every step, each ``[N, ops]``."""
        compute, actor = self.policy.op_probability_function(), self.actor
        probabilities = []
        for t, state in enumerate(hidden):
            legal = ActionMasks(actor.spread(masks.slots[t]), actor.spread(masks.kinds[t]))
            ops = compute(tuple(actor.spread(x, 1) for x in state), legal)
            probabilities.append(actor.part(ops))
        return probabilities


class RemoteGrowthTrainee(GrowthRounds):
    """Growth environments of actors and the policy that learns from them; see ``Trainee``.

    Args:
        config: settings of the run.
        actors: where and how the environments run.
        device: device of the learner; hosts run on the CPUs of the actors.
        resume: the run that ``restore`` continues, whose policy's features are observed; None for
            a new run.

    Raises:
        UsageError: a setting is invalid, or the actors cannot be started.
    """

    agent: PPOAgent[Observation]

    def __init__(
        self,
        config: TrainConfig,
        actors: ActorSettings,
        device: torch.device,
        resume: Path | None = None,
    ):
        world, self.policy = config.world, config.method.algorithm
        # Actors act with the learner's weights, so they need not have this policy.
        initial = None if resume else initial_checkpoint(config)
        features = initial.features if initial else None
        if resume is not None:
            features = latest_features(resume)
        tasks = resolve_tasks(config)
        settings = growth_config(config, tasks, CPU)
        self.layout = GrowthLayout(tasks, torch.arange(world.envs), settings, CPU)
        groups = torch.unique_consecutive(self.layout.groups, return_counts=True)[1]
        cuts = [int(part.sum()) for part in groups.tensor_split(actors.count)]
        complete = complete_config(config, self.layout, config.machine.backend)
        specs = actor_specs(complete, cuts, actors.lag == 0, features)
        data = data_from_files(config, tasks)
        self.actors = RemoteActors(actors, GrowthShard, specs, data, world.rounds, world.envs)
        descriptions = self.actors.descriptions
        names = {name for one in descriptions for name in one["backend"].split(" and ")}
        self.backend_name = " and ".join(sorted(names))
        self.precision = descriptions[0]["precision"]
        self.config = complete_config(config, self.layout, self.backend_name)
        self.agent = build_agent(self.config, device, initial, features)
        if self.precision.reason:
            notice(f"warning: use_amp: {self.precision.reason}; running in float32")

    def collect(
        self, hub: Hub, number: int, on_step: Callable[[AnyStep], None]
    ) -> Rollout[Observation]:
        """See ``Trainee.collect``. Steps are reported when all actors have delivered the round."""
        contents, _, lag = self.actors.collect(number, snapshot(self.agent))
        self.layout.draw_tasks(number)
        states = [one["rollout"] for one in contents]
        rollout = joined_rollout(Observation, states, CPU)
        rows = torch.arange(self.count)
        telemetry: StepTelemetry = merge([one["telemetry"] for one in contents], rows)
        last = {
            n: concatenation([one["after"][n] for one in contents], 0) for n in contents[0]["after"]
        }
        self.recorder = Recorder(hub, self.layout, number)
        observations = rollout.observation.tensors()
        for t in range(self.steps):
            now: StepTelemetry = element(telemetry, t, self.steps)
            done = t + 1 == self.steps
            following = last if done else {n: x[t + 1] for n, x in observations.items()}
            step = Step(Observation.from_tensors(following), now.reward, done, now.report)
            decision = _decision(rollout, telemetry.ops[:, t], t)
            self.recorder.step(t, rollout.actions[t], step, decision)
            on_step(step)
            if t % STEPS_AT_ONCE == STEPS_AT_ONCE - 1:
                hub.flush()
        result = joined_rollout(Observation, states, self.agent.device)
        result.lag = lag
        return result

    def environment_parts(self) -> dict[str, dict[str, Any]]:
        """See ``Trainee.environment_parts``; actors keep nothing."""
        return {"environment": {}}

    def restore_environments(self, parts: dict[str, dict[str, Any]]) -> None:
        """See ``Trainee.restore_environments``."""
        self.actors.begin(self.agent.updates + 1, [None] * len(self.actors.descriptions))

    def close(self) -> None:
        """See ``Trainee.close``."""
        self.actors.close()


def _decision(rollout: Rollout[Observation], ops: Tensor, t: int) -> Decision:
    masks = rollout.observation.masks
    return Decision(
        ActionMasks(masks.slots[t], masks.kinds[t]),
        rollout.actions[t],
        rollout.log_prob[t],
        rollout.values[t],
        lambda: ops,
    )
