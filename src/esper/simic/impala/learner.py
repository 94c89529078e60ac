"""What makes a learner one of IMPALA."""

from functools import partial
from typing import Any

from esper.leyline.config import ImpalaConfig, LearnerConfig
from esper.simic.impala.estimator import VTraceEstimator
from esper.simic.impala.lagged_actor import LaggedActor


def impala_arguments(learner: LearnerConfig, impala: ImpalaConfig | None) -> dict[str, Any]:
    """Arguments with which a ``PPOAgent`` learns by IMPALA; none without ``impala``."""
    if impala is None:
        return {}
    older = partial(LaggedActor, lag=impala.lag) if impala.lag else None
    return {"estimator": VTraceEstimator.of(learner, impala), "older": older}
