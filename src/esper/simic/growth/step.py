"""Settings of the growth environment, and the result of one of its steps."""

from dataclasses import dataclass

import torch
from torch import Tensor

from esper.kasmina.seeds import SeedSignals, SeedState
from esper.leyline.config import EpisodeRules
from esper.leyline.stages import Stage
from esper.tamiyo.policy.features import Observation
from esper.tolaria.results import Scores


@dataclass(frozen=True, slots=True)
class GrowthConfig(EpisodeRules):
    """Settings of growth environments other than their tasks.

    Attributes:
        seed: seed of the run.
        group_size: number of environments that share task, host, data and twin.
        common_seeds: whether seeds that germinate in the same step and slot of a group start from
            the same weights, so that its environments stay equal until their actions differ.
        episode_length: steps per episode.
        max_batches: minibatches per step.
        batch_size: images per minibatch.
        max_seeds: limit of living seeds per environment; the number of its slots if None.
        dtype: dtype of parameters and data.
        backend: backend of the hosts' arithmetic, one of ``tolaria.backends.choice.NAMES``.
        data_seed: seed of the minibatches; None for ``seed``. Another value gives the same hosts
            and seeds another order of their data.
        threads: CPU threads over which the environments are distributed.
        preload: see ``DataBank``; applies to CUDA devices only.
    """

    seed: int
    group_size: int = 8
    common_seeds: bool = False
    episode_length: int = 40
    max_batches: int = 8
    batch_size: int = 64
    max_seeds: int | None = None
    dtype: torch.dtype = torch.float32
    backend: str = "auto"
    data_seed: int | None = None
    threads: int = 1
    preload: bool | None = True


@dataclass(slots=True)
class StepReport:
    """What happened in a step, for telemetry and reports.

    Attributes:
        before: seeds before the action, ``[N, S]``.
        acted: seeds after the action.
        after: seeds after the tick.
        signals: measurements of the seeds, ``[N, S]``; a seed that does not act on the host's
            output has no contribution.
        seed_parameters: parameters of the living seeds after the tick, int64 ``[N, S]``.
        success: whether the action was legal, bool ``[N]``.
        rollback: ``tolaria.governor.Reason``, int64 ``[N]``. If it is above 0, the host was rolled
            back in this step, and all scores are those of the restored host.
        train_loss, train_accuracy: training results of the epoch, ``[N]``; NaN after a rollback.
        scores, twin_scores: validation scores of environments and of their twins, ``[N]``.
        committed, twin_committed: validation scores with fossilised seeds only; None before the
            last three steps.
        test, twin_test: test scores with fossilised seeds only, ``[N]``; None before the last step,
            so that nothing can be chosen by them.
        score, twin_score: mean of the last three expected accuracies, ``[N]``; on the last step
            those of the committed hosts.
        added_parameters: parameters that count for the price, int64 ``[N]``.
        shapley: exact Shapley values of the seeds for expected accuracy, ``[N, S]``; None before
            the last step.
        interactions: interaction of each pair of seeds, ``[N, S, S]``; None before the last step.
    """

    before: SeedState
    acted: SeedState
    after: SeedState
    signals: SeedSignals
    seed_parameters: Tensor
    success: Tensor
    rollback: Tensor
    train_loss: Tensor
    train_accuracy: Tensor
    scores: Scores
    twin_scores: Scores
    committed: Scores | None
    twin_committed: Scores | None
    test: Scores | None
    twin_test: Scores | None
    score: Tensor
    twin_score: Tensor
    added_parameters: Tensor
    shapley: Tensor | None
    interactions: Tensor | None

    def entered(self, stage: Stage) -> Tensor:
        """Number of seeds per environment that entered ``stage`` in this step, int64 ``[N]``."""
        return seeds_entering(stage, self.before.stage, self.acted.stage, self.after.stage)


def seeds_entering(stage: Stage, before: Tensor, acted: Tensor, after: Tensor) -> Tensor:
    """Number of seeds that enter ``stage``, by an action or by the tick.

    Args:
        stage: the stage entered.
        before, acted, after: stages before the action, after the action and after the tick,
            ``[..., S]``.

    Returns:
        int64 ``[...]``.
    """
    changes = (before, acted), (acted, after)
    counts = [((a != b) & (b == stage)).sum(-1) for a, b in changes]
    return counts[0] + counts[1]


@dataclass(slots=True)
class Step:
    """Result of an environment step: observation, reward ``[N]``, whether the episode is over."""

    observation: Observation
    reward: Tensor
    done: bool
    report: StepReport

    @property
    def count(self) -> int:
        """Number of environments."""
        return len(self.reward)
