"""Growing a single new host with a trained policy, and exporting it."""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from esper.kasmina.transfer import CPU
from esper.leyline.actions import (
    ALPHA_SPEED_STEPS,
    ALPHA_TARGETS,
    BLUEPRINTS,
    HEADS,
    TEMPO_STEPS,
    Op,
    Style,
)
from esper.leyline.config import TrainConfig, unflatten
from esper.leyline.errors import UsageError, suggestion
from esper.leyline.events import POINTS
from esper.leyline.phases import Phase, phase
from esper.leyline.stages import Stage
from esper.runtime import plugins
from esper.runtime.gate import NOTHING, Permission
from esper.runtime.tasks import SUITES, Task
from esper.simic.growth.collect import collect
from esper.simic.growth.environment import GrowthEnv
from esper.simic.growth.shard import Shard
from esper.simic.growth.step import GrowthConfig, Step, StepReport
from esper.simic.ppo import PPOAgent
from esper.simic.run.checkpoint import Checkpoint, load_latest, restore_agent
from esper.simic.run.run_directory import recorded_episodes, stored_config
from esper.simic.run.unusable_run import UnusableRun
from esper.simic.training.setup import build_agent, control
from esper.tamiyo.baselines import SEARCHES, Actor
from esper.tamiyo.policy.features import Observation
from esper.tamiyo.policy_box import cards, learned_path
from esper.tolaria.backends.choice import torch_backend
from esper.tolaria.export import committed_seeds, difference, grown_network
from esper.tolaria.governor import Reason
from esper.tolaria.precision import Precision
from esper.tolaria.results import Scores

CONTROLS = ("heuristic", "rule", "never")
DEFAULT = "rule"
"""The policy where no trained one fits."""
FROM_RECORDS = ("imitation", "offline")
"""Algorithms that do not act."""
SPLITS = ("test", "validation")


def is_run_directory(name: str) -> bool:
    """Whether a policy called ``name`` is that of a run."""
    return (Path(name) / "config.json").exists()


@dataclass(frozen=True, slots=True)
class GrowingPolicy:
    """A policy that grows hosts.

    Attributes:
        name: name given by the user.
        settings: settings of the run that trained the policy, the defaults for a control.
        checkpoint: the latest intact checkpoint of that run; None for a control.
        recorded: number of recorded episodes from which it learned; None if it did not.
    """

    name: str
    settings: TrainConfig
    checkpoint: Checkpoint | None
    recorded: int | None = None

    @property
    def learned(self) -> bool:
        """Whether a run trained the policy; a control is not learned."""
        return self.checkpoint is not None

    @property
    def identity(self) -> object:
        """What tells the policy from others, wherever its run lies: the checksums of its parts."""
        return self.name if self.checkpoint is None else self.checkpoint.sha256

    @property
    def greedy_by_default(self) -> bool:
        """Whether the policy learned from records, and so takes its most probable action.

        What it copies or compares are decisions; one that learned by acting has learned with its
        own draws.
        """
        return self.learned and self.settings.method.algorithm in FROM_RECORDS

    def trained_on_other_tasks(self, task: Task) -> bool:
        """Whether a run trained the policy, and on other tasks than this."""
        names = self.settings.world.task
        tasks = {*names, *(member for name in names for member in SUITES.get(name, ()))}
        return self.learned and not {task.name, task.name.partition(":")[0]} & tasks

    def slots_for(self, tasks: Sequence[Task]) -> tuple[str, ...]:
        """The slots of the run that trained the policy on ``tasks``; empty if they are those of the
        tasks, or if it was trained on others."""
        slots = self.settings.world.slots
        if any(self.trained_on_other_tasks(task) for task in tasks):
            return ()
        try:
            differs = any(task.with_slots(slots).host.slots != task.host.slots for task in tasks)
        except UsageError:
            return ()
        return slots if differs else ()

    @property
    def episodes(self) -> int:
        """Number of episodes on which the policy was trained, each counted once."""
        if self.checkpoint is None:
            return 0
        if self.recorded is not None:
            return self.recorded
        return self.checkpoint.round * self.settings.world.envs

    @classmethod
    def named(cls, name: str, permission: Permission = NOTHING) -> "GrowingPolicy":
        """The policy called ``name``: one of ``CONTROLS``, a trained one in the box, or a run's
        directory.

        Args:
            name: the name or the directory.
            permission: without which the plugins of the run, with whose blueprints its policy was
                trained, must have been loaded.

        Raises:
            UsageError: there is no such run, it trained a Gymnasium task, it has no intact
                checkpoint, or a plugin is not permitted.
        """
        if name in SEARCHES:
            raise UsageError(f"policy: {name!r} grows a model of your own; name another policy")
        if name in CONTROLS:
            return cls(name, TrainConfig(), None)
        run = learned_path(name) or Path(name)
        if not is_run_directory(str(run)):
            names = (*CONTROLS, *(card for card in cards() if card not in (*CONTROLS, *SEARCHES)))
            advice = "`esper policies` and `esper runs` list what there is"
            raise UsageError(
                f"policy: {name!r} is neither one of {', '.join(names)} nor a run directory; "
                f"{suggestion(name, names, advice)}"
            )
        try:
            settings, _ = stored_config(run)
        except UsageError as error:
            raise _about_policy(error) from error
        if settings.gymnasium.gym is not None:
            raise UsageError(
                f"policy: {name} was trained on {settings.gymnasium.gym}; esper play measures it"
            )
        plugins.load_all(settings, permission, str(run))
        try:
            return cls(name, settings, load_latest(run), recorded_episodes(run))
        except UsageError as error:
            raise _about_policy(error) from error

    @classmethod
    def trained_on(cls, task: Task) -> "GrowingPolicy":
        """The policy in the box that learned on tasks like ``task``, or ``DEFAULT``."""
        policies = (cls.named(name) for name, card in cards().items() if card.is_trained)
        return next(
            (one for one in policies if not one.trained_on_other_tasks(task)), cls.named(DEFAULT)
        )

    def actor(self, environment: GrowthEnv, greedy: bool) -> Actor:
        """The actor: an agent restored from the checkpoint, or the control.

        Args:
            environment: environment whose seed keys the policy's draws.
            greedy: whether a learned policy takes its most probable action instead of drawing.

        Raises:
            UsageError: the checkpoint does not fit the settings of its run.
        """
        if not self.learned:
            return control(self.name, environment)
        agent = self.agent(environment.config.seed)
        agent.greedy = greedy
        return agent

    def agent(self, seed: int) -> PPOAgent[Observation]:
        """The agent of a learned policy, restored from the checkpoint.

        Raises:
            UsageError: see ``actor``.
        """
        assert self.checkpoint is not None
        try:
            settings, features = unflatten({"seed": seed}, self.settings), self.checkpoint.features
            agent = build_agent(settings, CPU, features=features)
            restore_agent(agent, self.checkpoint.parts)
        except UsageError as error:
            raise _about_policy(error) from error
        return agent


def learned_actor(name: str, seed: int, warn: Callable[[str], None]) -> Actor:
    """The actor of a trained policy, for a module of the user's own.

    Args:
        name: a trained policy in the box, or the directory of a run, whose plugins must have been
            loaded.
        seed: seed of its draws.
        warn: told that it was trained on other hosts.

    Raises:
        UsageError: there is no such policy, or its checkpoint does not fit this version.
    """
    if learned_path(name) is None and not is_run_directory(name):
        raise UsageError(
            f"policy: {name!r} is neither one of {', '.join(cards())} nor a run directory; "
            + suggestion(name, cards(), "`esper policies` describes them")
        )
    policy = GrowingPolicy.named(name)
    tasks = ", ".join(policy.settings.world.task)
    warn(f"policy {name} was trained on {tasks}; on a module of your own it is untested")
    agent = policy.agent(seed)
    agent.greedy = policy.greedy_by_default
    return agent


def _about_policy(error: UsageError) -> UsageError:
    text = error.reason if isinstance(error, UnusableRun) else str(error)
    advice = "give another run"
    return UsageError(f"policy: {text}" if advice in text else f"policy: {text}; {advice}")


@dataclass(slots=True)
class Grown:
    """A host at the end of its episode.

    Attributes:
        task: the task it learned.
        network: the committed host as a stand-alone module.
        seeds: blueprint, style and alpha of the fossilised seeds, by slot.
        decisions: the actions and rollbacks of the episode, one line each.
        scores: scores of the committed host, by split of ``SPLITS``.
        twin_scores: scores of its never-grow twin, by split.
        gain: test utility minus that of the twin, in points.
        validation_gain: validation utility minus that of the twin, in points.
        added: parameters of the fossilised seeds.
        images: at most 64 images of the test split, ``[B, C, H, W]``.
        logits: the engine's logits for them, ``[B, classes]``.
    """

    task: Task
    network: nn.Module
    seeds: dict[str, str]
    decisions: list[str]
    scores: dict[str, Scores]
    twin_scores: dict[str, Scores]
    gain: float
    validation_gain: float
    added: int
    images: Tensor
    logits: Tensor


def grow_on_task(policy: GrowingPolicy, task: Task, seed: int = 42, greedy: bool = False) -> Grown:
    """Grow one newly initialised host of ``task`` through one episode.

    Args:
        policy: the policy; the lifecycle rules are those of the run that trained it.
        task: the task with its host, data and budgets.
        seed: seed of host, minibatches, new seeds' weights and the policy's draws.
        greedy: see ``GrowingPolicy.actor``.

    Raises:
        UsageError: the policy has no usable checkpoint, or the task does not run.
    """
    world = policy.settings.world
    config = GrowthConfig(
        seed=seed,
        group_size=1,
        episode_length=task.episode_length,
        max_batches=task.max_batches,
        batch_size=task.batch_size,
        max_seeds=world.max_seeds or task.max_seeds,
        **world.rules(),
    )
    environment = GrowthEnv([task], torch.arange(1), config, Precision("cpu"), CPU)
    with phase("growing", task.episode_length, "steps") as current:
        log = _DecisionLog(task, current)
        collect(environment, policy.actor(environment, greedy), 0, log.add)
    (shard,) = environment.shards
    assert log.last is not None
    gains = _gains(environment, log.last.report)
    return _grown(task, shard, log.lines, gains)


def _gains(environment: GrowthEnv, report: StepReport) -> tuple[float, float]:
    """The gain of the only environment at its last step, and its gain on validation."""
    assert report.test is not None
    assert report.twin_test is not None
    gain = (
        environment.utility(report.test.expected, report.added_parameters)
        - report.twin_test.expected
    )
    validation_gain = environment.utility(report.score, report.added_parameters) - report.twin_score
    return POINTS * float(gain[0]), POINTS * float(validation_gain[0])


def _grown(task: Task, shard: Shard, decisions: list[str], gains: tuple[float, float]) -> Grown:
    engine, state, last = shard.engine, shard.state, task.episode_length - 1
    scores = {split: engine.committed_scores(state, last, split) for split in SPLITS}
    fossilised = committed_seeds(state)
    images = engine.bank.held_back("test", engine.datasets(last)[:1]).by_row()[0][:64, :, :, 0]
    logits = torch_backend(task.host, Precision("cpu")).logits(engine.stack, fossilised, images)[0]
    return Grown(
        task=task,
        network=grown_network(task.host, engine.stack, state, 0),
        seeds={
            slot.name: f"{BLUEPRINTS[int(fossilised.blueprint[0, s])]}, "
            f"{Style(int(fossilised.style[0, s])).name}, alpha {float(fossilised.alpha[0, s]):.2g}"
            for s, slot in enumerate(task.host.slots)
            if bool(fossilised.computed[0, s])
        },
        decisions=decisions,
        scores={split: score.map(lambda x: x[0]) for split, score in scores.items()},
        twin_scores={split: score.map(lambda x: x[1]) for split, score in scores.items()},
        gain=gains[0],
        validation_gain=gains[1],
        added=int(torch.where(fossilised.computed, engine.seed_parameters(state), 0)[0].sum()),
        images=images.permute(0, 3, 1, 2).contiguous(),
        logits=logits,
    )


@dataclass(slots=True)
class _DecisionLog:
    """Collects one line for each action or rollback that changed a host, and the last step."""

    task: Task
    phase: Phase
    lines: list[str] = field(default_factory=list)
    last: Step | None = None

    def add(self, t: int, actions: Tensor, step: Step) -> None:
        """Add the lines of step ``t`` of the only environment."""
        self.last = step
        self.phase.advance()
        report = step.report
        action = dict(zip(HEADS, actions[0].tolist(), strict=True))
        if bool(report.success[0]) and action["op"] != Op.WAIT:
            self.lines.append(f"step {t:>3}  {self._describe(action, step)}")
        reason = Reason(int(report.rollback[0]))
        if reason is not Reason.NONE:
            self.lines.append(f"step {t:>3}  rolled back: {reason.name.lower()}")

    def _describe(self, action: dict[str, int], step: Step) -> str:
        op, s = Op(action["op"]), action["slot"]
        slot, state = self.task.host.slots[s].name, step.report.acted
        target = ALPHA_TARGETS[action["alpha_target"]]
        if op is Op.GERMINATE:
            return (
                f"{slot}: {BLUEPRINTS[action['blueprint']]} germinates, "
                f"{Style(action['style']).name}, to alpha {target} in "
                f"{TEMPO_STEPS[action['tempo']]} steps"
            )
        seed = f"{slot}: {BLUEPRINTS[int(step.report.before.blueprint[0, s])]}"
        steps = ALPHA_SPEED_STEPS[action["alpha_speed"]]
        if op is Op.SET_ALPHA_TARGET:
            return f"{seed} goes to alpha {target} in {steps} steps"
        if op is Op.PRUNE:
            return f"{seed} is pruned in {steps} steps"
        return f"{seed} becomes {Stage(int(state.stage[0, s])).name}"


def check_file(content: bytes, grown: Grown) -> float:
    """Load the content of a ``.pt2`` file and run it.

    Returns:
        how far its logits differ from the engine's, see ``export.difference``.
    """
    module = torch.export.load(io.BytesIO(content)).module()
    with torch.no_grad():
        return difference(grown.logits, module(grown.images))
