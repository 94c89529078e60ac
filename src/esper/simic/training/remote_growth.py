"""Growth environments in the processes of actors, and the trainee that learns from them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from esper.kasmina.transfer import CPU
from esper.leyline.config import TrainConfig
from esper.leyline.notices import notice
from esper.nissa.hub import Hub
from esper.simic.actor import PolicyActor, load_snapshot, snapshot
from esper.simic.distributed.cluster import ActorSettings, Cluster
from esper.simic.distributed.placed_actor import PlacedActor
from esper.simic.distributed.remote_actors import RemoteActors, mean_lag
from esper.simic.distributed.wire import as_arrays, as_tensors, element, stack
from esper.simic.growth.agent import GrowthMoments
from esper.simic.growth.collect import collect
from esper.simic.growth.layout import GrowthLayout, merge
from esper.simic.growth.step import Step, StepReport
from esper.simic.ppo import PPOAgent
from esper.simic.rollout import Rollout
from esper.simic.run.checkpoint import agent_parts, latest_features, restore_agent
from esper.simic.training.actor_specs import (
    ActorSpec,
    Data,
    actor_specs,
    concatenation,
    data_from_files,
    joined_rollout,
    with_data,
)
from esper.simic.training.decisions import Decision, RemoteDecision
from esper.simic.training.growth_trainee import GrowthRounds
from esper.simic.training.recorder import Recorder
from esper.simic.training.setup import (
    build_agent,
    build_environment,
    complete_config,
    growth_config,
    policy_dtype,
    resolve_tasks,
)
from esper.simic.training.trainee import AnyStep
from esper.simic.training.warm_start import initial_checkpoint
from esper.tamiyo.policy.action_masks import ActionMasks
from esper.tamiyo.policy.factored_lstm import FactoredLSTM
from esper.tamiyo.policy.features import Observation
from esper.tamiyo.policy.interface import RecurrentState

STEPS_AT_ONCE = 64
"""Steps of a delivered episode after which the sinks are waited for: their queue is bounded, and
steps that do not fit are dropped."""


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
        parts = self.policy, GrowthMoments(CPU, spec.features), config.world.seed, CPU
        rows = spec.begin, spec.end, spec.total
        self.placement = PlacedActor(*parts, *rows) if spec.synchronous else None
        self.actor: PolicyActor[Observation] = self.placement or PolicyActor(*parts)

    def describe(self) -> dict[str, Any]:
        """See ``Shard.describe``: the backend and the precision in use."""
        environment = self.environment
        return {"backend": environment.backend_name, "precision": environment.precision}

    def collect(self, number: int, weights: dict[str, Any], before: Any) -> tuple[Any, Any]:
        """See ``Shard.collect``. Every episode begins with new hosts, so nothing is kept."""
        load_snapshot(self.actor, as_tensors(weights))
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
        return as_arrays(result), None

    def _op_probabilities(self, hidden: list[RecurrentState], masks: ActionMasks) -> list[Tensor]:
        """The probability of each op in every step, each ``[N, ops]``."""
        compute = self.policy.op_probability_function()
        probabilities = []
        for t, state in enumerate(hidden):
            legal = ActionMasks(masks.slots[t], masks.kinds[t])
            if self.placement is not None:
                state = tuple(self.placement.spread(x, 1) for x in state)
                legal = ActionMasks(*map(self.placement.spread, (legal.slots, legal.kinds)))
            ops = compute(state, legal)
            probabilities.append(ops if self.placement is None else self.placement.part(ops))
        return probabilities


class RemoteGrowthTrainee(GrowthRounds):
    """Growth environments of actors and the policy that learns from them; see ``Trainee``.

    Args:
        config: settings of the run.
        actors: where and how the environments run.
        device: device of the learner; hosts run on the CPUs of the actors.
        resume: the run that ``restore`` continues, whose policy's features are observed; None for
            a new run.
        check: called while waiting for actors; may raise.

    Raises:
        UsageError: a setting is invalid, or the actors cannot be started.
    """

    agent: PPOAgent[Observation]

    def __init__(
        self,
        config: TrainConfig,
        actors: ActorSettings,
        device: torch.device,
        resume: Path | None,
        check: Callable[[], None],
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
        self._check, lag = check, actors.lag
        groups = torch.unique_consecutive(self.layout.groups, return_counts=True)[1]
        cuts = [int(part.sum()) for part in groups.tensor_split(actors.count)]
        complete = complete_config(config, self.layout, config.machine.backend)
        specs = actor_specs(complete, cuts, lag == 0, features)
        data = data_from_files(config, tasks)
        self.cluster = Cluster(actors.address, actors.count)
        try:
            self.actors = RemoteActors(
                self.cluster, GrowthShard, specs, data, lag, world.rounds, world.envs
            )
        except BaseException:
            self.cluster.close()
            raise
        descriptions = self.actors.descriptions
        names = {name for one in descriptions for name in one["backend"].split(" and ")}
        self.backend_name = " and ".join(sorted(names))
        self.precision = descriptions[0]["precision"]
        self.config = complete_config(config, self.layout, self.backend_name)
        self.agent = build_agent(self.config, device, initial, features)
        if self.precision.reason:
            notice(f"warning: use_amp: {self.precision.reason}; running in float32")

    def amp_scale(self) -> float | None:
        """See ``Trainee.amp_scale``."""
        return None

    def collect(
        self, hub: Hub, number: int, on_step: Callable[[AnyStep], None]
    ) -> Rollout[Observation]:
        """See ``Trainee.collect``. Steps are reported when all actors have delivered the round."""
        weights = as_arrays(snapshot(self.agent))
        deliveries = self.actors.collect(number, weights, self._check)
        contents = [as_tensors(delivery.rollout) for delivery in deliveries]
        self.layout.draw_tasks(number)
        states = [one["rollout"] for one in contents]
        rollout = joined_rollout(Observation, states, CPU)
        rows = torch.arange(self.count)
        telemetry: StepTelemetry = merge([one["telemetry"] for one in contents], rows)
        last = {
            n: concatenation([one["after"][n] for one in contents], 0) for n in contents[0]["after"]
        }
        decision = RemoteDecision()
        self.recorder = Recorder(hub, self.layout, number, decision)
        observations = rollout.observation.tensors()
        for t in range(self.steps):
            decision.last = _decision(rollout, telemetry.ops[:, t], t)
            now: StepTelemetry = element(telemetry, t, self.steps)
            done = t + 1 == self.steps
            following = last if done else {n: x[t + 1] for n, x in observations.items()}
            step = Step(Observation.from_tensors(following), now.reward, done, now.report)
            self.recorder.step(t, rollout.actions[t], step)
            on_step(step)
            if t % STEPS_AT_ONCE == STEPS_AT_ONCE - 1:
                hub.flush()
        result = joined_rollout(Observation, states, self.agent.device)
        result.lag = mean_lag(deliveries, number, self.actors.lag)
        return result

    def parts(self) -> dict[str, dict[str, Any]]:
        """See ``Trainee.parts``. Every round has new hosts, and actors keep nothing."""
        return agent_parts(self.agent) | {"environment": {}}

    def restore(self, parts: dict[str, dict[str, Any]]) -> None:
        """See ``Trainee.restore``."""
        restore_agent(self.agent, parts)
        self.actors.begin(self.agent.updates + 1, [None] * len(self.actors.descriptions))

    def close(self) -> None:
        """See ``Trainee.close``."""
        self.actors.close()
        self.cluster.close()


def _decision(rollout: Rollout[Observation], ops: Tensor, t: int) -> Decision:
    masks = rollout.observation.masks
    return Decision(
        ActionMasks(masks.slots[t], masks.kinds[t]),
        rollout.actions[t],
        rollout.log_prob[t],
        rollout.values[t],
        lambda: ops,
    )
