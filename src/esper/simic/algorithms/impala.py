"""IMPALA, as ``esper train impala``; its learner is in ``simic.impala``."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self

from esper.leyline.config import LearnerConfig, TrainConfig
from esper.leyline.config.algorithm import Algorithm, AlgorithmConfig, register
from esper.leyline.config.setting import POSITIVE, Range, setting
from esper.leyline.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class ImpalaConfig(AlgorithmConfig):
    """How esper train impala learns from rollouts of an older policy (docs/learning.md)."""

    actors: int = setting(0, Range(0, 10_000), on_resume=True, main=True)
    """Number of actors, which collect the rollouts in processes of their own, on ray (extra `ray`);
    each has a part of the environments and takes one CPU. With 0, the learner's process collects
    them."""
    ray_address: str | None = setting(None, on_resume=True)
    """Head node of the ray cluster on which the actors run, as HOST:PORT, or auto for the cluster
    that this machine belongs to; by default ray is started on this machine."""
    lag: int | None = setting(None, Range(0, 1_000), main=True)
    """Without actors: number of updates by which the policy that acts is behind the one that
    learns, by default 0. The lag is artificial: it shows, in one process, what actors elsewhere
    cause. With actors: largest number of updates by which the weights of a rollout may be behind,
    by default 1; with 0, actors wait for every update, and results are those of one process."""
    correction: Literal["vtrace", "none"] = setting("vtrace")
    """Correction of the lag: vtrace weights every step by the importance ratio of its action; none
    learns as if the current policy had acted."""
    rho_clip: float = setting(1.0, POSITIVE)
    """Maximum importance ratio in the errors of V-trace (rho bar). It decides which policy the
    critic values: with a large one the policy that learns, with a small one the policy that
    acted."""
    c_clip: float = setting(1.0, POSITIVE)
    """Maximum importance ratio in the traces of V-trace (c bar), at most rho_clip. It trades bias
    for variance only while the critic is inexact."""

    @property
    def lag_in_effect(self) -> int:
        """The lag, by default 0 without and 1 with actors."""
        if self.lag is not None:
            return self.lag
        return 1 if self.actors else 0

    def check(self, config: TrainConfig) -> None:
        """See ``AlgorithmConfig.check``."""
        if self.c_clip > self.rho_clip:
            raise UsageError(
                f"c_clip: must be at most rho_clip, {self.rho_clip}, got {self.c_clip}"
            )
        world = config.world
        if not self.actors:
            if self.ray_address is not None:
                raise UsageError(
                    "ray_address: there are no actors; give --actors too, or leave it out"
                )
            return
        if len(config.machine.devices) > 1:
            raise UsageError("devices: with actors, hosts run on their CPUs; give one device")
        if config.gymnasium.vectorization != "sync":
            raise UsageError("vectorization: actors are processes already; leave it out")
        size = world.group_size if config.gymnasium.gym is None else 1
        groups = -(-world.envs // size)
        if self.actors > groups:
            what = "environments" if size == 1 else f"groups of {size} environments"
            raise UsageError(
                f"actors: {self.actors} are more than the {groups} {what}, which stay whole; take "
                "fewer actors or more envs"
            )

    def check_resumed(self, before: Self) -> None:
        """See ``AlgorithmConfig.check_resumed``."""
        if before.lag and (before.actors == 0) != (self.actors == 0):
            raise UsageError(
                f"actors: the run has {before.actors} and a lag of {before.lag}, so its older "
                "weights are elsewhere; resume it with actors if it had some, else without"
            )

    def resolved(self) -> dict[str, Any]:
        """See ``AlgorithmConfig.resolved``."""
        return {"lag": self.lag_in_effect}

    def learner_arguments(self, learner: LearnerConfig) -> dict[str, Any]:
        """See ``AlgorithmConfig.learner_arguments``: V-trace, and the copy that acts if it lags."""
        from esper.simic.impala import LaggedActor, VTraceEstimator

        with_vtrace = self.correction == "vtrace"
        decay = learner.discount, learner.trace_decay
        # The weights of actors elsewhere are behind by themselves.
        lag = 0 if self.actors else self.lag_in_effect
        return {
            "estimator": VTraceEstimator(*decay, self.rho_clip, self.c_clip, with_vtrace),
            "older": partial(LaggedActor, lag=lag) if lag else None,
        }

    def trainee(
        self,
        config: TrainConfig,
        device: "torch.device",
        resume: "Path | None",
        check: Callable[[], None],
    ) -> Any:
        """See ``AlgorithmConfig.trainee``: one whose environments are those of actors, if any."""
        if not self.actors:
            return None
        from esper.simic.distributed.cluster import ActorSettings

        actors = ActorSettings(self.actors, self.ray_address, self.lag_in_effect, check)
        if config.gymnasium.gym is not None:
            from esper.simic.training.gym_trainee import RemoteGymTrainee

            return RemoteGymTrainee(config, actors, device)
        from esper.simic.training.growth_trainee import RemoteGrowthTrainee

        return RemoteGrowthTrainee(config, actors, device, resume)


register(
    Algorithm(
        name="impala",
        title="IMPALA",
        summary="Train a growth policy with IMPALA.",
        description=(
            "Train a growth policy with IMPALA: V-trace corrects for an acting policy that lags "
            "behind.\n\n"
            "If a Gymnasium environment is named, train a policy for it instead."
        ),
        settings=ImpalaConfig,
        defaults={"ppo_epochs": 1},
    )
)
