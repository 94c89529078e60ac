"""PPO, as ``esper train ppo``; its learner is ``simic.ppo``."""

from esper.leyline.config.algorithm import Algorithm, register

register(
    Algorithm(
        name="ppo",
        title="PPO",
        summary="Train a growth policy with PPO.",
        description=(
            "Train a growth policy with PPO: it decides in every epoch what grows in each host, "
            "and where.\n\n"
            "If a Gymnasium environment is named, train a policy for it instead."
        ),
    )
)
