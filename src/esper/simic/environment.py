"""The growth environment: N hosts in training as one environment of tensors.

One step applies the actions, trains an epoch, validates and ablates, lets alphas and stages tick,
and returns reward, observation and masks. All N run in lockstep and end together. For each group
of environments a never-grow twin, same host and same data, is trained along: the gain over it is
what growing was worth. The twins are rows behind the N environments and take no actions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from esper.kasmina.lifecycle import (
    Rules,
    SeedSignals,
    SeedState,
    apply,
    legal_slots,
    tick,
)
from esper.leyline.actions import BLUEPRINTS, HEADS, Op
from esper.leyline.stages import Stage
from esper.runtime.tasks import Task
from esper.simic.rewards import (
    REWARD_MODES,
    SCORE_WINDOW,
    paired_reward,
    terminal_reward,
    utility,
)
from esper.tamiyo.policy.action_masks import ActionMasks
from esper.tamiyo.policy.features import (
    HISTORY,
    Observation,
    Progress,
    critic_features,
    host_features,
    slot_features,
)
from esper.tolaria.backends import EpochResult
from esper.tolaria.engine import Engine, Measurement, Rows
from esper.tolaria.health import updated_signals
from esper.tolaria.precision import Precision

TWIN_STREAM = 1 << 30
"""Identities of twins start here, so that no environment ever shares one."""


@dataclass(frozen=True, slots=True)
class GrowthConfig:
    """What an environment needs besides its task.

    Attributes:
        seed: of the run.
        group_size: environments that share host, data and twin.
        episode_length: steps of an episode.
        max_batches: minibatches of a step.
        batch_size: images of a minibatch.
        max_seeds: most living seeds an environment may have.
        reward: ``terminal`` or ``paired``.
        dtype: of parameters and data.
    """

    seed: int
    group_size: int = 8
    episode_length: int = 40
    max_batches: int = 8
    batch_size: int = 64
    max_seeds: int = 1 << 30
    reward: str = "paired"
    dtype: torch.dtype = torch.float32


@dataclass(slots=True)
class StepReport:
    """What happened in a step, for telemetry and reports. Rows are the N environments.

    Attributes:
        epoch: what training measured, all rows.
        measurement: what validation found, all rows.
        before: the seeds before the action, ``[N, S]``.
        acted: after the action.
        after: after the tick.
        success: whether the action was legal, bool ``[N]``.
        score, twin_score: mean of the last three expected accuracies, ``[N]``; as committed on the
            last step.
        added: parameters that count for the rent, ``[N]``.
        living_parameters: parameters of the living seeds, ``[N]``.
    """

    epoch: EpochResult
    measurement: Measurement
    before: SeedState
    acted: SeedState
    after: SeedState
    success: Tensor
    score: Tensor
    twin_score: Tensor
    added: Tensor
    living_parameters: Tensor


@dataclass(slots=True)
class Step:
    """Result of ``GrowthEnv.step``: observation, reward ``[N]``, whether the episode is over."""

    observation: Observation
    reward: Tensor
    done: bool
    report: StepReport


class GrowthEnv:
    """N environments of one task.

    Args:
        task: what they train.
        environments: identities, int64 ``[N]``. The numbers of an environment depend on its
            identity and actions alone, so any subset replays the same trajectories.
        config: see ``GrowthConfig``.
        precision: of the hosts' arithmetic.
        device: where everything lives.
    """

    def __init__(
        self,
        task: Task,
        environments: Tensor,
        config: GrowthConfig,
        precision: Precision,
        device: torch.device,
    ):
        if config.reward not in REWARD_MODES:
            raise ValueError(f"reward must be one of {REWARD_MODES}, got {config.reward!r}")
        self.task, self.config, self.device = task, config, device
        self.environments = environments.to(device)
        self.count: int = len(environments)
        groups = self.environments // config.group_size
        twin_groups, self.twin_of = torch.unique(groups, return_inverse=True)
        self.rows = Rows(
            torch.cat([self.environments, TWIN_STREAM + twin_groups]),
            torch.cat([groups, twin_groups]),
        )
        self.engine = Engine(
            task,
            self.rows,
            config.seed,
            precision,
            config.dtype,
            device,
            config.max_batches,
            config.batch_size,
        )
        self.slots = task.host.slots
        self.host_parameters = task.host.parameter_count
        self.rules = Rules.for_horizon(config.episode_length, config.max_seeds)
        kinds = torch.zeros(len(self.slots), len(BLUEPRINTS), dtype=torch.bool)
        for s, slot in enumerate(self.slots):
            kinds[s, list(slot.kinds)] = True
        self.kinds = kinds.to(device)
        self.idle = torch.zeros(len(twin_groups), len(HEADS), dtype=torch.long, device=device)

    def reset(self, episode: int) -> Observation:
        """Begin episode number ``episode`` with fresh hosts."""
        rows, shape = len(self.rows), (len(self.rows), len(self.slots))
        self.engine.reset(episode)
        self.state = SeedState.dormant(shape, self.device)
        self.signals = SeedSignals.unknown(shape, self.device)
        nan = torch.full(
            (rows, HISTORY + 1), float("nan"), device=self.device, dtype=self.config.dtype
        )
        self.progress = Progress(
            step=0,
            episode_length=self.config.episode_length,
            losses=nan,
            expected=nan.clone(),
            train_loss=nan[:, 0].clone(),
            train_accuracy=nan[:, 0].clone(),
            last_op=torch.zeros(rows, dtype=torch.long, device=self.device),
            success=torch.ones(rows, dtype=torch.bool, device=self.device),
            rolled_back=torch.zeros(rows, dtype=torch.bool, device=self.device),
        )
        scores = self.engine.measure(self.state, committed=False).scores
        self._remember(scores.loss, scores.expected)
        self.committed: list[Tensor] = []
        self.gain = torch.zeros(self.count, dtype=self.config.dtype, device=self.device)
        return self._observe()

    def step(self, actions: Tensor) -> Step:
        """One environment step for all.

        Args:
            actions: int64 ``[N, heads]``. An illegal action changes nothing; see
                ``StepReport.success``.
        """
        assert self.progress.step < self.config.episode_length, "the episode is over: reset first"
        before = self.state
        everyone = torch.cat([actions, self.idle])
        legal = legal_slots(self.state, self.signals, self.rules)
        acted, success = apply(self.state, everyone, legal, self.kinds)
        born = (acted.stage == Stage.GERMINATED) & (before.stage == Stage.DORMANT)
        self.engine.germinate(born, acted.blueprint, self.progress.step)

        epoch = self.engine.train(acted, self.progress.step)
        now = self.progress.step + 1
        last = now == self.config.episode_length
        near_end = now > self.config.episode_length - SCORE_WINDOW
        measurement = self.engine.measure(acted, committed=near_end)
        signals = updated_signals(
            self.signals.forget(born), acted, self.slots, epoch, measurement.contribution
        )
        self.state = tick(acted, self.rules)
        self.signals = signals.forget(~self.state.living)

        self.progress.step = now
        self.progress.train_loss = epoch.loss
        self.progress.train_accuracy = epoch.accuracy
        self.progress.last_op = torch.where(success, everyone[:, 0], Op.WAIT)
        self.progress.success = success
        self._remember(measurement.scores.loss, measurement.scores.expected)
        if measurement.committed is not None:
            self.committed.append(measurement.committed.expected)

        score, twin_score = self._scores(last)
        added, living = self._added(last)
        reward = self._reward(score, twin_score, added, last)
        report = StepReport(
            epoch=epoch,
            measurement=measurement,
            before=before.map(self._own),
            acted=acted.map(self._own),
            after=self.state.map(self._own),
            success=self._own(success),
            score=score,
            twin_score=twin_score,
            added=added,
            living_parameters=living,
        )
        return Step(self._observe(), reward, last, report)

    def _own(self, rows: Tensor) -> Tensor:
        """The environments' part of a tensor over all rows."""
        return rows[: self.count]

    def _remember(self, loss: Tensor, expected: Tensor) -> None:
        progress = self.progress
        progress.losses = torch.cat([progress.losses[:, 1:], loss[:, None]], 1)
        progress.expected = torch.cat([progress.expected[:, 1:], expected[:, None]], 1)

    def _scores(self, last: bool) -> tuple[Tensor, Tensor]:
        """Smoothed expected accuracy of environments and of their twins, ``[N]`` each."""
        window = self.progress.expected[:, -min(SCORE_WINDOW, self.progress.step + 1) :]
        if last:
            window = torch.stack(self.committed, 1)
        score = window.mean(1)
        return score[: self.count], score[self.count :][self.twin_of]

    def _added(self, last: bool) -> tuple[Tensor, Tensor]:
        """Parameters that pay rent, and parameters of all living seeds, ``[N]`` each."""
        parameters = self._own(self.engine.seed_parameters(self.state))
        state = self.state.map(self._own)
        counted = state.stage == Stage.FOSSILISED if last else state.acting
        return torch.where(counted, parameters, 0).sum(1), parameters.sum(1)

    def _reward(self, score: Tensor, twin_score: Tensor, added: Tensor, last: bool) -> Tensor:
        now = utility(score, added, self.host_parameters)
        if self.config.reward == "terminal":
            return terminal_reward(now, last)
        reward = paired_reward(now, twin_score, self.gain)
        self.gain = now - twin_score
        return reward

    def _observe(self) -> Observation:
        progress, state = self.progress, self.state
        parameters = self.engine.seed_parameters(state)
        mine = Progress(
            progress.step,
            progress.episode_length,
            *(self._own(getattr(progress, name)) for name in _PER_ROW),
        )
        own_state, own_parameters = state.map(self._own), self._own(parameters)
        own_signals = SeedSignals(
            *(self._own(getattr(self.signals, name)) for name in SeedSignals.__slots__)
        )
        score, twin_score = self._scores(last=False)
        legal = legal_slots(own_state, own_signals, self.rules)
        return Observation(
            host=host_features(
                mine, own_state, self.host_parameters, own_parameters, self.rules.max_seeds
            ),
            slots=slot_features(
                self.slots,
                progress.episode_length,
                own_state,
                own_signals,
                self.host_parameters,
                own_parameters,
            ),
            blueprints=torch.where(own_state.living, own_state.blueprint, 0),
            critic=critic_features(score, twin_score),
            masks=ActionMasks(legal, self.kinds.expand(self.count, -1, -1)),
        )


_PER_ROW = (
    "losses",
    "expected",
    "train_loss",
    "train_accuracy",
    "last_op",
    "success",
    "rolled_back",
)
