"""Copies of trained hosts that train and store few numbers: norms and head, or low-rank changes.

The hosts of a stack are a function of these numbers, through which autograd goes; everything else
is the torch backend's.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from esper.kasmina.hosts.host import Host
from esper.tolaria.backends import Backend, Minibatches, Optimisation
from esper.tolaria.backends.torch import Network, TorchBackend, cross_entropy
from esper.tolaria.optim import StoreRows
from esper.tolaria.plan import Seeds, plan
from esper.tolaria.precision import Precision
from esper.tolaria.results import SLOT_MEASURES, EpochResult
from esper.tolaria.stores import AdamState, Stack
from esper_lab.evaluation import NORM_TUNING, RANK_1_TUNING, RANK_4_TUNING

NORM_RATE = 0.1
"""Rate of norms in that of the head: at the head's best rate they would lose what they know."""


class NormsAndHead:
    """The weights and biases of all norms, and the last layer.

    Attributes:
        size: how many numbers are stored.
        rates: factor of the learning rate of each, ``[size]``.
    """

    def __init__(self, host: Host):
        owners = host.layout.segments(host.layout.size).tolist()
        names = [host.layout.fields[owner].name for owner in owners]
        columns = [i for i, name in enumerate(names) if name.startswith(("norm", "head"))]
        rates = [NORM_RATE if names[i].startswith("norm") else 1.0 for i in columns]
        self._columns, self.rates = torch.tensor(columns), torch.tensor(rates)
        self.size = len(columns)

    def begin(self, hosts: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
        """What hosts ``[N, P]`` are at the start of an epoch.

        Args:
            hosts: them; the engine may have moved their channels since the epoch before.
            before: the numbers at the end of that, if there was one.

        Returns:
            the numbers ``[N, size]``, and what stays, ``[N, P]``.
        """
        return hosts[:, self._columns].contiguous(), hosts.clone()

    def hosts(self, constant: Tensor, numbers: Tensor) -> Tensor:
        """The hosts of such numbers, ``[N, P]``."""
        return constant.index_copy(1, self._columns, numbers)


class LowRank:
    """The product of two matrices is added to each weight (Hu et al., "LoRA", ICLR 2022).

    The first is drawn as torch draws layers, the same for every host, and the second is 0. Weights
    of convolutions are matrices with a row for each channel that is written. Biases and norms stay.
    The methods are those of ``NormsAndHead``.
    """

    def __init__(self, host: Host, rank: int):
        self._layout, self._rank = host.layout, rank
        weights = [field for field in host.layout.fields if len(field.shape) > 1]
        self._shapes = {
            field.name: (field.shape[0], field.size // field.shape[0]) for field in weights
        }
        self._sizes = [rank * size for shape in self._shapes.values() for size in shape[::-1]]
        self.size, self.rates = sum(self._sizes), torch.tensor([1.0])

    def begin(self, hosts: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
        if before is None:
            generator, draws = torch.Generator().manual_seed(0), list[Tensor]()
            for rows, columns in self._shapes.values():
                first = 2.0 * torch.rand(self._rank * columns, generator=generator) - 1.0
                draws += [first * columns**-0.5, torch.zeros(self._rank * rows)]
            before = torch.cat(draws).to(hosts).repeat(len(hosts), 1)
        return before, hosts - self._difference(before)

    def hosts(self, constant: Tensor, numbers: Tensor) -> Tensor:
        return constant + self._difference(numbers)

    def _difference(self, numbers: Tensor) -> Tensor:
        """What is added to the parameters, ``[N, P]``."""
        parts = iter(numbers.split(self._sizes, 1))
        products = {
            name: part.unflatten(1, (self._rank, columns)).mT @ next(parts).unflatten(1, (-1, rows))
            for (name, (rows, columns)), part in zip(self._shapes.items(), parts, strict=False)
        }
        zeros = numbers.new_zeros(len(numbers), self._layout.size)
        views = zeros.split([field.size for field in self._layout.fields], 1)
        both = zip(self._layout.fields, views, strict=True)
        return torch.cat(
            [products[f.name].mT.flatten(1) if f.name in products else zero for f, zero in both], 1
        )


CHANGES: dict[str, Callable[[Host], NormsAndHead | LowRank]] = {
    NORM_TUNING: NormsAndHead,
    RANK_1_TUNING: partial(LowRank, rank=1),
    RANK_4_TUNING: partial(LowRank, rank=4),
}
"""By the name of a tuning, what it trains of a host; of a ``NormedHost`` only."""


class SmallCopies(TorchBackend):
    """The torch backend for hosts without seeds of which only a change is trained.

    Args:
        tuning: what is trained, one of ``CHANGES``.
        host: see ``TorchBackend``.
        evaluated_by: scores the hosts, as those of other controls.
    """

    def __init__(self, tuning: str, host: Host, evaluated_by: Backend):
        super().__init__(host, Precision("cpu"))
        self.evaluate = evaluated_by.evaluate  # type: ignore[method-assign]
        self._change = CHANGES[tuning](host)
        self._states: dict[int, tuple[Tensor, AdamState]] = {}

    def train_epoch(
        self, stack: Stack, seeds: Seeds, minibatches: Minibatches, optimisation: Optimisation
    ) -> EpochResult:
        """See ``Backend.train_epoch``."""
        before, optimizer = self._states.get(id(stack), (None, None))
        numbers, constant = self._change.begin(stack.host, before)
        optimizer = optimizer or AdamState.zeros_like(numbers)
        self._states[id(stack)] = numbers, optimizer
        rate = optimisation.host_learning_rate[:, None] * self._change.rates
        rows = StoreRows(numbers, optimizer, optimisation, rate, optimisation.weight_decay)
        buffers, losses, hits = self.host.buffers.views(stack.buffers), [], []
        for images, drawn_labels in minibatches:
            labels, leaf = drawn_labels.flatten(1), numbers.detach().requires_grad_()
            hosts = self.host.layout.views(self._change.hosts(constant, leaf))
            logits = self._forward(Network(hosts, buffers, {}, plan(seeds)), images, training=True)
            loss = cross_entropy(logits, labels)
            rows.update(torch.autograd.grad(loss.sum(), leaf)[0])
            losses.append(loss.detach())
            hits.append((logits.detach().argmax(-1) == labels).to(loss.dtype).mean(1))
        stack.host.copy_(self._change.hosts(constant, numbers))
        slots = numbers.new_full((*seeds.computed.shape, len(SLOT_MEASURES)), float("nan"))
        return self._result(torch.stack(losses), torch.stack(hits), rows, {}, slots)
