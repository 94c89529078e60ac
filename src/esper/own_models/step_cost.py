"""What one training step of a module costs in memory and time, predicted from a few samples.

Memory is counted rather than observed: the bytes that autograd keeps for the backward pass, and
those of parameters, gradients and the state of AdamW. Both memory and time are linear in the number
of samples beyond a constant, so two small batches predict the whole one.
"""

from dataclasses import dataclass, fields
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from esper.leyline.config import WorldConfig
from esper.leyline.phases import duration
from esper.own_models.objectives import Objective
from esper.own_models.samples import SAMPLES, buffers_kept, call, first_samples, random_state_kept
from esper.runtime.tasks import Task

REPEATS, MAX_REPEATS, SECONDS = 3, 15, 1.5
"""Minimum and maximum number of steps of each batch, and seconds after which no more are taken.
The fastest counts: a difference of small batches is scaled to a whole one, and noise with it."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of a training step.

    Attributes:
        activations: bytes that autograd keeps for the backward pass.
        seconds: time of forward and backward pass.
    """

    activations: float
    seconds: float

    def at(self, samples: int, last: "Cost", count: int, more: int) -> "Cost":
        """The cost of ``samples``: on the line through this, of ``count``, and ``last``."""
        if more == count:
            return self

        def line(a: float, b: float) -> float:
            return max(a, a + (b - a) / (more - count) * (samples - count))

        return Cost(line(self.activations, last.activations), line(self.seconds, last.seconds))


def predicted_cost(
    model: nn.Module, inputs: Any, target: Any, objective: Objective, samples: int
) -> Cost:
    """The cost of a training step of ``samples`` samples; the module stays as it is.

    Args:
        model: the module, in training mode.
        inputs: a whole batch of its inputs; at most ``SAMPLES`` of its samples are used.
        target: the targets.
        objective: the loss.
        samples: their number.
    """
    fewest, more = min(2, samples), min(SAMPLES, samples)

    def step(count: int) -> Cost:
        some = first_samples(inputs, count, samples), first_samples(target, count, samples)
        return step_cost(model, *some, objective)

    # The first step allocates and chooses algorithms.
    step(fewest)
    pairs: list[tuple[Cost, Cost]] = []
    begun = perf_counter()
    while len(pairs) < REPEATS or (len(pairs) < MAX_REPEATS and perf_counter() - begun < SECONDS):
        pairs.append((step(fewest), step(more)))
    least, most = (min(costs, key=lambda cost: cost.seconds) for costs in zip(*pairs, strict=True))
    return least.at(samples, most, fewest, more)


def step_cost(model: nn.Module, inputs: Any, target: Any, objective: Objective) -> Cost:
    """Measure forward and backward pass; parameters, gradients and buffers stay as they are."""
    storages: dict[int, int] = {}
    parameters_at = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def note(x: Tensor) -> Tensor:
        if x.layout == torch.strided and x.untyped_storage().data_ptr() not in parameters_at:
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    begun = perf_counter()
    with random_state_kept(), buffers_kept(model):
        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            loss = objective.loss(call(model, inputs), target)
        parameters = [p for p in model.parameters() if p.requires_grad]
        torch.autograd.grad(loss, parameters, allow_unused=True)
    return Cost(float(sum(storages.values())), perf_counter() - begun)


def parameter_bytes(model: nn.Module) -> int:
    """Bytes of parameters and buffers, gradients, and the two moments of AdamW."""
    trainable = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    every = (*model.parameters(), *model.buffers())
    return 3 * trainable + sum(x.numel() * x.element_size() for x in every)


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
