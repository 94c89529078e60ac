"""Learning from records, as ``esper train imitation`` and ``esper train offline``.

Their settings are documented under ``esper.leyline.config.offline``, their runs are made by
``simic.offline.offline_run``.
"""

from esper.leyline.config.algorithm import Algorithm, register
from esper.leyline.config.offline import ImitationConfig, OfflineConfig

register(
    Algorithm(
        name="imitation",
        title="imitation",
        summary="Clone policies from the records of their runs.",
        description=(
            "Clone policies from the records of their runs: learn to act as they did, without "
            "acting."
        ),
        settings=ImitationConfig,
        from_records=True,
    )
)
register(
    Algorithm(
        name="offline",
        title="offline learning",
        summary="Learn a better policy from the records of other runs.",
        description="Learn a better policy from the records of other runs, without acting.",
        settings=OfflineConfig,
        from_records=True,
    )
)
