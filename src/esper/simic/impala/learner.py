"""What makes a learner one of IMPALA."""

from functools import partial
from typing import Any

from esper.leyline.config import ImpalaConfig, LearnerConfig, lag_of
from esper.simic.impala.estimator import VTraceEstimator
from esper.simic.impala.lagged_actor import LaggedActor


def impala_arguments(learner: LearnerConfig, impala: ImpalaConfig | None) -> dict[str, Any]:
    """Arguments with which a ``PPOAgent`` learns by IMPALA; none without ``impala``."""
    if impala is None:
        return {}
    # The weights of actors elsewhere are behind by themselves.
    lag = 0 if impala.actors else lag_of(impala)
    older = partial(LaggedActor, lag=lag) if lag else None
    return {"estimator": VTraceEstimator.of(learner, impala), "older": older}
