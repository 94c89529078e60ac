"""What training a policy on a module would take, predicted from the cost of one training step."""

from dataclasses import dataclass, fields
from typing import Any

from esper.leyline.config import WorldConfig
from esper.runtime.tasks import Task

GIBIBYTE = 2**30


@dataclass(frozen=True, slots=True)
class PolicyPrice:
    """Prediction for one training of a policy with the settings that Esper has by default.

    Both figures are lower bounds: N modules are trained at once, with all their activations, by
    functions that are slower for one module than its own layers.

    Attributes:
        rounds, envs, steps: rounds, modules that are trained at once, and steps of an episode.
        batches: minibatches of a step.
        seconds: time on this device.
        bytes: memory.
    """

    rounds: int
    envs: int
    steps: int
    batches: int
    seconds: float
    bytes: float

    def __str__(self) -> str:
        return (
            f"training one on this model: {self.rounds} rounds of {self.envs} copies, "
            f"{self.steps} steps of {self.batches} minibatches: at least "
            f"{duration(self.seconds)} and {self.bytes / GIBIBYTE:,.1f} GiB"
        )


def policy_price(seconds: float, memory: float, batches: int) -> PolicyPrice:
    """Predict the training of a policy.

    Args:
        seconds: time of a training step of one module with a seed in every slot.
        memory: bytes of such a step.
        batches: minibatches of an epoch.
    """
    world = WorldConfig()
    usual: dict[str, Any] = {f.name: f.default for f in fields(Task)}
    steps, most = usual["episode_length"], usual["max_batches"]
    count = min(batches, most)
    total = world.rounds * world.envs * steps * count * seconds
    return PolicyPrice(world.rounds, world.envs, steps, count, total, world.envs * memory)


def duration(seconds: float) -> str:
    """Seconds as text, in the largest unit of which there are at least two."""
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:,.1f} s"
