"""Environments whose hosts have one shape: one stack of parameters, one tensor program.

One step applies the actions, trains an epoch, validates and ablates, runs the governor's checks,
ticks alphas and stages, and returns reward, observation and masks. Each group of environments has a
never-grow twin, a host with the same initial weights that trains on the same data: a host's gain is
its utility minus the score of its twin. The twins are the rows after the environments and take no
actions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from esper.kasmina.lifecycle import Rules, automatic_gates, roll_back
from esper.kasmina.seeds import SeedSignals, SeedState
from esper.kasmina.transfer import moved, on_host
from esper.leyline.actions import BLUEPRINTS, HEADS, Op
from esper.leyline.stages import Stage
from esper.simic.growth.rewards import (
    REWARDS,
    SCORE_WINDOW,
    RewardInputs,
    RewardOptions,
    escrow_credit,
    stage_shaping,
)
from esper.simic.growth.step import GrowthConfig, Step, StepReport
from esper.tamiyo.policy.action_masks import ActionMasks
from esper.tamiyo.policy.features import HISTORY, Observation, Progress, log_price, utility
from esper.tamiyo.step_functions import ActionOutcome, TorchStep
from esper.tolaria.backends import Backend
from esper.tolaria.bank import DataBank
from esper.tolaria.engine import Engine, Rows
from esper.tolaria.governor import Governor, Reason
from esper.tolaria.precision import LossScales
from esper.tolaria.results import SLOT_MEASURES, EpochResult, Measurement, Scores

TWIN_STREAM = 1 << 30
"""First identity of a twin, above the identities of all environments."""


@dataclass(slots=True)
class _EpochOutcome:
    """Outcome of an epoch of all rows.

    Attributes:
        epoch: result of training.
        measurement: result of validation, of the restored host where the governor rolled back.
        rollback: ``Reason``, int64 ``[R]``.
        rolled_back: rows that were rolled back, bool ``[R]``.
        state: seeds during validation; the ``acted`` state itself if nothing was rolled back.
        host: ``state`` in CPU memory.
    """

    epoch: EpochResult
    measurement: Measurement
    rollback: Tensor
    rolled_back: Tensor
    state: SeedState
    host: SeedState

    @property
    def scores(self) -> Scores:
        """Validation scores of the hosts with all acting seeds."""
        return self.measurement.scores

    @property
    def committed(self) -> Scores | None:
        """Validation scores with fossilised seeds only; None before the last three steps."""
        return self.measurement.committed

    @property
    def contribution(self) -> Tensor:
        """Contribution of each seed, ``[R, S]``; NaN for seeds that do not act."""
        return self.measurement.contribution


class Shard:
    """Environments whose tasks share one ``StackKey``, for one episode after another.

    Args:
        bank: the tasks and their data.
        environments: identities, int64 ``[N]``. The results of an environment depend only on its
            identity, task and actions, so any subset replays the same trajectories.
        tasks: index of each environment's task in ``bank``, int64 ``[N]``; equal within a group.
        config: see ``GrowthConfig``.
        backend: computes the hosts.
        scales: loss scales of the environments, then of the twins, for backends that compute in
            float16; updated in place and kept across episodes.
    """

    def __init__(
        self,
        bank: DataBank,
        environments: Tensor,
        tasks: Tensor,
        config: GrowthConfig,
        backend: Backend,
        scales: LossScales | None = None,
    ):
        self.config, self.device = config, bank.device
        self.count = len(environments)
        groups = environments // config.group_size
        twin_groups, self.twin_of = torch.unique(groups, return_inverse=True)
        twin_tasks = torch.zeros_like(twin_groups).scatter(0, self.twin_of, tasks)
        births = groups * config.group_size if config.common_seeds else environments
        rows = Rows(
            torch.cat([births, TWIN_STREAM + twin_groups]),
            torch.cat([groups, twin_groups]),
            torch.cat([tasks, twin_tasks]),
        )
        self.engine = Engine(
            bank,
            rows,
            config.seed,
            backend,
            config.max_batches,
            config.batch_size,
            config.episode_length,
            scales,
            config.data_seed,
        )
        self.slots = self.engine.slots
        self.host_parameters = self.engine.host.parameter_count
        self.price = bank.prices[tasks]
        self.log_price = log_price(bank.prices[rows.task])
        self.deadline = bank.deadlines[rows.task]
        self.rules = Rules.for_horizon(
            config.episode_length,
            config.max_seeds or len(self.slots),
            config.strict_gates,
            config.one_at_a_time,
            automatic_gates(config.auto_advance),
        )
        self.reward_options = RewardOptions.of(config.reward_options)
        kinds = torch.zeros(len(self.slots), len(BLUEPRINTS), dtype=torch.bool)
        for s, slot in enumerate(self.slots):
            kinds[s, list(slot.kinds)] = True
        self.kinds = kinds.to(self.device)
        # Contiguous and created outside inference mode: every observation contains this tensor.
        self.every_kind = self.kinds.expand(self.count, -1, -1).contiguous()
        self.functions = TorchStep(self.engine, self.count, self.rules, self.kinds)
        self.idle = torch.zeros(len(twin_groups), len(HEADS), dtype=torch.long, device=self.device)

    @property
    def cost(self) -> int:
        """Approximate cost of a step: host parameters times rows."""
        return len(self.engine.rows) * self.host_parameters

    def reset(self, episode: int) -> Observation:
        """Begin episode number ``episode`` with newly initialised hosts."""
        with torch.inference_mode():
            observation = self._reset(episode)
        return _free(observation)

    def step(self, actions: Tensor) -> Step:
        """One step of every environment; ``actions`` int64 ``[N, heads]``.

        The step runs in inference mode, which saves autograd's overhead on hundreds of small
        operations. Observation and reward are returned as ordinary tensors for the learner.
        """
        with torch.inference_mode():
            step = self._step(actions)
        step.observation, step.reward = _free(step.observation), step.reward.clone()
        return step

    def _reset(self, episode: int) -> Observation:
        rows = len(self.engine.rows)
        shape = (rows, len(self.slots))
        self.engine.reset(episode)
        self.governor = Governor(self.engine.stack, self.engine.host.classes)
        self.now = self.functions.begin(
            SeedState.dormant(shape, self.device), SeedSignals.unknown(shape, self.device)
        )
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
            slot_measures=nan.new_full((*shape, len(SLOT_MEASURES)), float("nan")),
            last_op=torch.zeros(rows, dtype=torch.long, device=self.device),
            success=torch.ones(rows, dtype=torch.bool, device=self.device),
            rolled_back=torch.zeros(rows, dtype=torch.bool, device=self.device),
            log_price=self.log_price,
            deadline=self.deadline,
        )
        scores = self.engine.measure(self.state, 0, committed=False).scores
        self._remember(scores)
        self.initial_accuracy = self.accuracy = scores.accuracy
        self.committed_accuracy: list[Tensor] = []
        self.loss = self._environment_rows(scores.loss)
        self.gain = torch.zeros(self.count, dtype=self.config.dtype, device=self.device)
        self.credit = self.gain.new_zeros(self.count, len(self.slots))
        return self._observe(*self._scores(last=False))

    @property
    def state(self) -> SeedState:
        """The current seeds of all rows."""
        return self.now.state

    def _step(self, actions: Tensor) -> Step:
        t, before = self.progress.step, self.now
        assert t < self.config.episode_length, "the episode is over: reset first"
        last = t + 1 == self.config.episode_length
        all_actions = torch.cat([actions, self.idle])
        action = self.functions.act(before.state, all_actions, before.legal)
        self._germinate(action, t)
        outcome = self._run_epoch(action, t)
        coalitions = self.engine.coalitions(outcome.state, t, outcome.host) if last else None
        test = (
            self.engine.committed_scores(outcome.state, t, "test", outcome.host) if last else None
        )
        self._advance_lifecycle(action, outcome)
        op = torch.where(action.success, all_actions[:, HEADS.index("op")], Op.WAIT)
        self._note(t + 1, outcome, op, action.success)

        scores = self._scores(last=False)
        score, twin_score = self._scores(last) if last else scores
        added_parameters = self._priced_parameters(last)
        reward_scores = outcome.committed if last and outcome.committed else outcome.scores
        inputs = RewardInputs(
            step=t + 1,
            episode_length=self.config.episode_length,
            last=last,
            op=self._environment_rows(op),
            slot=all_actions[: self.count, HEADS.index("slot")],
            before=before.own,
            after=self.now.own,
            contribution=self._environment_rows(outcome.contribution).to(score.dtype),
            accuracy=self._environment_rows(reward_scores.accuracy),
            initial_accuracy=self._environment_rows(self.initial_accuracy),
            birth_accuracy=self._environment_rows(self.now.birth_accuracy).to(score.dtype),
            score=score,
            twin_score=twin_score,
            previous_gain=self.gain,
            host_parameters=self.host_parameters,
            seed_parameters=self._environment_rows(self.now.seed_parameters_max),
            added_parameters=added_parameters,
            price=self.price,
            credit=self.credit,
            loss=self._environment_rows(outcome.scores.loss),
            previous_loss=self.loss,
            options=self.reward_options,
        )
        self.loss = inputs.loss
        if self.config.reward == "escrow":
            self.credit = escrow_credit(inputs)
        reward = self._reward(inputs, self._environment_rows(outcome.rolled_back))
        self.gain = utility(score, added_parameters, self.host_parameters, self.price) - twin_score
        report = StepReport(
            before=inputs.before,
            acted=action.environment_state,
            after=inputs.after,
            signals=self.now.own_signals,
            seed_parameters=self._environment_rows(self.now.seed_parameters),
            success=self._environment_rows(action.success),
            rollback=self._environment_rows(outcome.rollback),
            train_loss=self._environment_rows(outcome.epoch.loss),
            train_accuracy=self._environment_rows(outcome.epoch.accuracy),
            scores=outcome.scores.map(self._environment_rows),
            twin_scores=outcome.scores.map(self._twins),
            committed=outcome.committed and outcome.committed.map(self._environment_rows),
            twin_committed=outcome.committed and outcome.committed.map(self._twins),
            test=test and test.map(self._environment_rows),
            twin_test=test and test.map(self._twins),
            score=score,
            twin_score=twin_score,
            added_parameters=added_parameters,
            shapley=self._environment_rows(coalitions.shapley()) if coalitions else None,
            interactions=self._environment_rows(coalitions.interactions()) if coalitions else None,
        )
        return Step(self._observe(*scores), reward, last, report)

    def _germinate(self, action: ActionOutcome, t: int) -> None:
        """Initialise the weights of new seeds; snapshot the hosts that fossilised a seed."""
        before, after = action.host_before.stage, action.host.stage
        if action.fossilises:
            fossilises = (after == Stage.FOSSILISED) & (before == Stage.HOLDING)
            self.governor.snapshot(moved(fossilises.any(1), self.device))
        if action.germinates:
            germinates = (after == Stage.GERMINATED) & (before == Stage.DORMANT)
            self.engine.germinate(germinates, action.state.blueprint, t)

    def _run_epoch(self, action: ActionOutcome, t: int) -> "_EpochOutcome":
        """Train an epoch, validate, and roll back the rows that the governor rejects."""
        epoch_state, host = action.state, action.host
        near_end = t + 1 > self.config.episode_length - SCORE_WINDOW
        move = self.engine.shift_channels(t)
        if move is not None:
            self.governor.follow(move)
        variants = self.engine.variants(host, committed=near_end)
        epoch = self.engine.train(epoch_state, t, host)
        measurement = self.engine.measure(
            epoch_state, t, committed=near_end, variants=variants, host=host
        )
        rollback = self.functions.check(self.governor, epoch, measurement.scores, epoch_state)
        rolled_back = rollback != Reason.NONE
        state = epoch_state
        (host_rollback,) = on_host(rolled_back)
        if bool(host_rollback.any()):
            state = roll_back(epoch_state, rolled_back)
            host = state if state.stage.device.type == "cpu" else roll_back(host, host_rollback)
            self._restore(rolled_back, host_rollback, state, host, t, epoch, measurement)
        if (t + 1) % self.governor.every == 0:
            self.governor.snapshot(self.governor.healthy)
        return _EpochOutcome(epoch, measurement, rollback, rolled_back, state, host)

    def _advance_lifecycle(self, action: ActionOutcome, outcome: "_EpochOutcome") -> None:
        """Tick the lifecycle and update the signals from the measurements."""
        self.now = self.functions.advance_lifecycle(
            action.state,
            None if outcome.state is action.state else outcome.rolled_back,
            self.now,
            self.accuracy,
            outcome.epoch,
            outcome.measurement,
        )
        self.accuracy = outcome.scores.accuracy

    def _environment_rows(self, rows: Tensor) -> Tensor:
        """The environments' rows of a tensor over all rows."""
        return rows[: self.count]

    def _twins(self, rows: Tensor) -> Tensor:
        """The row of each environment's twin, ``[N, ...]``."""
        return rows[self.count :][self.twin_of]

    def _restore(
        self,
        rolled_back: Tensor,
        host_rollback: Tensor,
        state: SeedState,
        host: SeedState,
        t: int,
        epoch: EpochResult,
        measurement: Measurement,
    ) -> None:
        """Restore rows from snapshots and replace their scores by those of the restored hosts.

        ``host_rollback`` and ``host`` are ``rolled_back`` and ``state`` in CPU memory.
        """
        self.governor.restore(rolled_back)
        host_rows = host_rollback.nonzero()[:, 0]
        rows = moved(host_rows, self.device)
        with_commitments = measurement.committed is not None
        rows_state = state.map(lambda x: x[rows])
        rows_host = rows_state if host is state else host.map(lambda x: x[host_rows])
        again = self.engine.measure(
            rows_state, t, committed=with_commitments, rows=rows, host=rows_host
        )
        for target, source in (
            (measurement.scores, again.scores),
            (measurement.committed, again.committed),
        ):
            if target is not None and source is not None:
                target.put(rows, source)
        measurement.contribution[rows] = again.contribution
        epoch.forget(rolled_back)

    def _note(self, step: int, outcome: "_EpochOutcome", op: Tensor, success: Tensor) -> None:
        """Update the progress with the results of a step."""
        progress = self.progress
        progress.step = step
        progress.train_loss, progress.train_accuracy = outcome.epoch.loss, outcome.epoch.accuracy
        progress.slot_measures = outcome.epoch.slots
        progress.last_op, progress.success, progress.rolled_back = op, success, outcome.rolled_back
        self._remember(outcome.scores)
        if outcome.committed is not None:
            self.committed_accuracy.append(outcome.committed.expected)

    def _remember(self, scores: Scores) -> None:
        progress = self.progress
        progress.losses = torch.cat([progress.losses[:, 1:], scores.loss[:, None]], 1)
        progress.expected = torch.cat([progress.expected[:, 1:], scores.expected[:, None]], 1)

    def _scores(self, last: bool) -> tuple[Tensor, Tensor]:
        """Smoothed expected accuracy of environments and of their twins, ``[N]`` each.

        If ``last``, only fossilised seeds act.
        """
        window = self.progress.expected[:, -min(SCORE_WINDOW, self.progress.step + 1) :]
        if last:
            window = torch.stack(self.committed_accuracy, 1)
        score = window.mean(1)
        return self._environment_rows(score), self._twins(score)

    def _priced_parameters(self, last: bool) -> Tensor:
        """Number of parameters that pay the price, int64 ``[N]``."""
        state = self.now.own
        pays = state.stage == Stage.FOSSILISED if last else state.acting
        return torch.where(pays, self._environment_rows(self.now.seed_parameters), 0).sum(1)

    def _reward(self, inputs: RewardInputs, rolled_back: Tensor) -> Tensor:
        reward = REWARDS[self.config.reward](inputs)
        if self.config.stage_shaping:
            reward = reward + self.config.stage_shaping * stage_shaping(inputs)
        return reward - self.config.rollback_penalty * rolled_back

    def _observe(self, score: Tensor, twin_score: Tensor) -> Observation:
        features = self.functions.observe(self.progress, self.now, score, twin_score)
        return Observation(
            host=features.host,
            slots=features.slots,
            blueprints=features.blueprints,
            critic=features.critic,
            masks=ActionMasks(self._environment_rows(self.now.legal), self.every_kind),
        )


def _free(observation: Observation) -> Observation:
    """The observation with its inference tensors copied to ordinary ones."""
    tensors = {
        name: x.clone() if x.is_inference() else x for name, x in observation.tensors().items()
    }
    return Observation.from_tensors(tensors)
