"""The engine: N hosts of one shape in training, and what a step measures of them."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.kasmina.lifecycle import SeedState
from esper.kasmina.rng import Purpose, integers, uniform
from esper.kasmina.slots import stack_tables
from esper.kasmina.stack import Stack
from esper.leyline.stages import Stage
from esper.runtime.tasks import Task
from esper.tolaria.backends import Backend, EpochResult, Optimisation, Scores, Variant
from esper.tolaria.backends.torch import TorchBackend
from esper.tolaria.memory import keep_memory
from esper.tolaria.plan import plan_evaluation, plan_training
from esper.tolaria.precision import Precision


@dataclass(frozen=True, slots=True)
class Rows:
    """Who the rows of the stack are.

    Attributes:
        environment: identity of each row's seeds and actions, int64 ``[N]``.
        group: identity of each row's host and data, int64 ``[N]``. Rows of one group start from
            the same host and see the same minibatches.
    """

    environment: Tensor
    group: Tensor

    def __len__(self) -> int:
        return len(self.environment)


@dataclass(frozen=True, slots=True)
class Measurement:
    """What validation found.

    Attributes:
        scores: the hosts as they are, ``[N]``.
        committed: with fossilised seeds alone, ``[N]``; None when not asked for.
        contribution: expected accuracy with minus without each acting seed, ``[N, S]``, in [-1, 1],
            NaN where no seed acts.
    """

    scores: Scores
    committed: Scores | None
    contribution: Tensor


class Engine:
    """Parameters, data and arithmetic of N hosts.

    Args:
        task: host, data and budget.
        rows: identities; the numbers of a row depend on these and on nothing else.
        seed: of the run, in [0, 2^32).
        precision: of the arithmetic.
        dtype: of parameters and data.
        device: where everything lives.
        max_batches: minibatches of an epoch.
        batch_size: images of a minibatch.
        max_gradient_norm: at which the gradient of each host, and of each seed, is clipped.
    """

    def __init__(
        self,
        task: Task,
        rows: Rows,
        seed: int,
        precision: Precision,
        dtype: torch.dtype,
        device: torch.device,
        max_batches: int,
        batch_size: int,
        max_gradient_norm: float = 1.0,
    ):
        keep_memory()
        self.host = task.host
        self.slots = task.host.slots
        self.rows = rows
        self.seed = seed
        self.dtype = dtype
        self.device = device
        self.max_batches = max_batches
        self.batch_size = batch_size
        self.data = task.data().to(dtype, device)
        self.backend: Backend = TorchBackend(task.host, precision)
        self.stack = Stack.allocate(
            len(rows),
            self.host.layout.size,
            self.host.buffers.size,
            [slot.width for slot in self.slots],
            dtype,
            device,
        )
        rate = torch.tensor(task.learning_rate, dtype=dtype, device=device)
        self.optimisation = Optimisation(
            host_learning_rate=rate.expand(len(rows)),
            seed_learning_rate=rate.expand(len(rows), len(self.slots)),
            weight_decay=task.weight_decay,
            max_gradient_norm=max_gradient_norm,
        )
        self.parameter_table = stack_tables(self.slots, "parameter_table").to(device)
        self.groups, self.group_index = torch.unique(rows.group, return_inverse=True)
        self.episode = 0

    def reset(self, episode: int) -> None:
        """Fresh hosts without seeds for one episode."""
        self.episode = episode
        groups, index = self.groups, self.group_index
        born = self._born(
            *self.host.layout.birth(self.host.layout.size), groups, Purpose.HOST_INIT, 0
        )
        constant, _ = self.host.buffers.birth(self.host.buffers.size)
        self.stack.host.copy_(born[index])
        self.stack.buffers.copy_(constant.to(self.device, self.dtype).expand_as(self.stack.buffers))
        for store in self.stack.seeds:
            store.zero_()
        self.stack.clear_optimizers()

    def germinate(self, where: Tensor, blueprint: Tensor, step: int) -> None:
        """Give birth to the parameters of new seeds.

        Args:
            where: bool ``[N, S]``, the seeds that germinate now.
            blueprint: int64 ``[N, S]``.
            step: of the episode; part of the identity of the seed's initial numbers.
        """
        for s, slot in enumerate(self.slots):
            rows = where[:, s].nonzero()[:, 0]
            if len(rows) == 0:
                continue
            constant, bound = (table.to(self.device) for table in slot.birth_table)
            kinds = blueprint[rows, s]
            self.stack.seeds[s][rows] = self._born(
                constant[kinds],
                bound[kinds],
                self.rows.environment[rows],
                Purpose.SEED_INIT + s,
                step,
            )
            self.stack.seed_optimizers[s].clear(where[:, s])

    def train(self, state: SeedState, step: int) -> EpochResult:
        """Train every host, and every seed from TRAINING on, for one epoch."""
        return self.backend.train_epoch(
            self.stack, plan_training(state), state.frozen, self.batches(step), self.optimisation
        )

    def measure(self, state: SeedState, committed: bool, split: str = "validation") -> Measurement:
        """Validate every host, once more without each acting seed, and as committed."""
        variants = self._ablations(state)
        ablated = len(variants)
        if committed:
            variants += self._commitments(state)
        scores, others = self.backend.evaluate(
            self.stack,
            plan_evaluation(state.blueprint, state.style, state.alpha),
            getattr(self.data, f"{split}_images"),
            getattr(self.data, f"{split}_labels"),
            variants,
        )
        contribution = torch.where(state.acting, 0.0, float("nan"))
        for variant, without in zip(variants[:ablated], others, strict=False):
            found = scores.expected[variant.rows] - without.expected
            contribution[variant.rows, variant.start] = found.float()
        kept = None
        if committed:
            parts = [scores.loss.clone(), scores.accuracy.clone(), scores.expected.clone()]
            for variant, other in zip(variants[ablated:], others[ablated:], strict=True):
                for part, value in zip(
                    parts, (other.loss, other.accuracy, other.expected), strict=True
                ):
                    part[variant.rows] = value
            kept = Scores(*parts)
        return Measurement(scores, kept, contribution)

    def seed_parameters(self, state: SeedState) -> Tensor:
        """Parameters of the living seeds, int64 ``[N, S]``."""
        slot = torch.arange(len(self.slots), device=self.device)
        counts = self.parameter_table[slot, state.blueprint, state.style]
        return torch.where(state.living, counts, 0)

    def _born(
        self, constant: Tensor, bound: Tensor, streams: Tensor, purpose: int, step: int
    ) -> Tensor:
        width = constant.shape[-1]
        drawn = uniform(self.seed, streams, purpose, self.episode, step, width, dtype=torch.float64)
        born = constant.to(self.device) + bound.to(self.device) * (2.0 * drawn - 1.0)
        return born.to(self.dtype)

    def batches(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Minibatches drawn with replacement, the same for all rows of a group."""
        groups, index = self.groups, self.group_index
        drawn = integers(
            self.seed,
            groups,
            Purpose.MINIBATCH,
            self.episode,
            step,
            self.max_batches * self.batch_size,
            len(self.data.train_labels),
        )
        for samples in drawn[index].split(self.batch_size, 1):
            images = self.data.train_images[samples.t()]
            yield images.permute(0, 2, 3, 1, 4).contiguous(), self.data.train_labels[samples]

    def _ablations(self, state: SeedState) -> list[Variant]:
        """Each acting seed's alpha at 0, one variant a slot."""
        variants = []
        for s in range(len(self.slots)):
            rows = (state.alpha[:, s] > 0).nonzero()[:, 0]
            if len(rows):
                alpha = state.alpha[rows].clone()
                alpha[:, s] = 0.0
                variants.append(Variant(s, rows, state.blueprint[rows], state.style[rows], alpha))
        return variants

    def _commitments(self, state: SeedState) -> list[Variant]:
        """The alpha of every seed that is not fossilised at 0, grouped by the first such slot."""
        loose = (state.alpha > 0) & (state.stage != Stage.FOSSILISED)
        first = torch.where(loose.any(1), loose.int().argmax(1), -1)
        alpha = state.alpha.masked_fill(loose, 0.0)
        variants = []
        for s in range(len(self.slots)):
            rows = (first == s).nonzero()[:, 0]
            if len(rows):
                variants.append(
                    Variant(s, rows, state.blueprint[rows], state.style[rows], alpha[rows])
                )
        return variants
