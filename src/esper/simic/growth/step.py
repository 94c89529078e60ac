"""What an environment is asked for and what a step of it gives."""

from dataclasses import dataclass

import torch
from torch import Tensor

from esper.kasmina.seeds import SeedSignals, SeedState
from esper.leyline.stages import Stage
from esper.tamiyo.policy.features import Observation
from esper.tolaria.backends import Scores


@dataclass(frozen=True, slots=True)
class GrowthConfig:
    """What environments need besides their tasks.

    Attributes:
        seed: of the run.
        group_size: environments that share task, host, data and twin.
        episode_length: steps of an episode.
        max_batches: minibatches of a step.
        batch_size: images of a minibatch.
        max_seeds: most living seeds an environment may have; as many as its host has slots when
            None.
        reward: one of ``simic.growth.rewards.REWARD_MODES``.
        stage_shaping: weight of the potential of the stages in the reward.
        rollback_penalty: taken from the reward of a step in which the governor rolls back.
        strict_gates: whether seeds must also have improved something, see ``kasmina.gates``.
        one_at_a_time: whether a seed may germinate only while no other develops.
        dtype: of parameters and data.
        backend: of the hosts' arithmetic, one of ``tolaria.backends.choice.NAMES``.
        threads: CPU threads the environments are dealt over.
        preload: see ``DataBank``; for CUDA devices alone.
    """

    seed: int
    group_size: int = 8
    episode_length: int = 40
    max_batches: int = 8
    batch_size: int = 64
    max_seeds: int | None = None
    reward: str = "paired"
    stage_shaping: float = 0.0
    rollback_penalty: float = 1.0
    strict_gates: bool = False
    one_at_a_time: bool = True
    dtype: torch.dtype = torch.float32
    backend: str = "auto"
    threads: int = 1
    preload: bool | None = True


@dataclass(slots=True)
class StepReport:
    """What happened in a step, for telemetry and reports.

    Attributes:
        before: the seeds before the action, ``[N, S]``.
        acted: after the action.
        after: after the tick.
        signals: what was measured of the seeds, ``[N, S]``; what did not act has no contribution.
        seed_parameters: of the living seeds after the tick, int64 ``[N, S]``.
        success: whether the action was legal, bool ``[N]``.
        rollback: ``tolaria.governor.Reason``, int64 ``[N]``; above 0 where the host was rolled back
            in this step. All scores are then those of the restored host.
        train_loss, train_accuracy: of the epoch, ``[N]``; NaN where it was rolled back.
        scores, twin_scores: validation of environments and of their twins, ``[N]``.
        committed, twin_committed: with fossils alone; None but in the last three steps.
        score, twin_score: mean of the last three expected accuracies, ``[N]``; as committed on the
            last step.
        added: parameters that count for the rent, int64 ``[N]``.
        shapley: exact Shapley value of each seed's expected accuracy, ``[N, S]``; None but in the
            last step.
        interactions: of each pair of seeds, ``[N, S, S]``; likewise.
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
    score: Tensor
    twin_score: Tensor
    added: Tensor
    shapley: Tensor | None
    interactions: Tensor | None

    def entered(self, stage: Stage) -> Tensor:
        """How many seeds of each environment came into ``stage`` in this step, int64 ``[N]``."""
        return seeds_entering(stage, self.before.stage, self.acted.stage, self.after.stage)


def seeds_entering(stage: Stage, before: Tensor, acted: Tensor, after: Tensor) -> Tensor:
    """How many seeds come into ``stage``, by an action or by the passing of time.

    Args:
        stage: into which.
        before, acted, after: stages before and after the action, and after the tick,
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
        """Environments."""
        return len(self.reward)
