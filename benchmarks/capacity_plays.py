"""What the study plays on a host, see ``capacity_page.py``.

Trainings are those of the suite ``capacity``, in which layers may become wider by the operators of
``esper.grow``; their cost is counted in operations.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from time import process_time
from typing import Any

import torch
from capacity_rules import by_table
from torch import Tensor, nn
from torch.optim import Optimizer

from esper import shrink_and_perturb
from esper.kasmina.channel_groups import channel_groups
from esper.kasmina.wider_layers import parameter_count, widen
from esper.kasmina.width_prior import GAINS
from esper.own_models.new_units import BATCHES, propose
from esper.own_models.width_search import BEGIN
from esper_lab.capacity.hosts import VALIDATION, Host, Split
from esper_lab.capacity.training import BATCH, FACTORS, RATE, arrival, beginning, counted_operations
from esper_lab.capacity.training import utility as utility_of

AGAIN = 0.4
SHARE = 0.3
"""Of its weights that a trained network keeps where a plan shrinks it."""
SHARES = 1.0, 0.8, 0.6, 0.45, 0.3
"""Of its weights that a trained host keeps before it is widened."""
RATES = 0.002, 0.015, 0.04
"""Further rates, where each arm chooses its own by validation."""


@dataclass(frozen=True)
class Plan:
    """By how much all hidden layers become wider.

    Attributes:
        first, second: factors after ``BEGIN`` and ``AGAIN`` of the epochs, of a trained host at
            once and never.
        shrunk: whether the weights are shrunk first, see ``esper.shrink_and_perturb``.
        static: factor of the width from the start; the network is a fresh one then.
    """

    first: float = 1.0
    second: float = 1.0
    shrunk: bool = False
    static: float = 0.0


STATICS = tuple(Plan(static=factor) for factor in FACTORS)
WIDENINGS = tuple(Plan(factor) for factor in FACTORS)
SEQUENCES = (
    *WIDENINGS,
    *(Plan(1.0, factor) for factor in (2.0, 4.0)),
    *(Plan(1.5, factor) for factor in (2.0, 4.0)),
    *(Plan(2.0, factor) for factor in (2.0, 4.0)),
    Plan(4.0, 2.0),
)
"""What a host from scratch can do."""
IN_PLACE = (*WIDENINGS, *(Plan(factor, shrunk=True) for factor in FACTORS))
"""What a trained host can do."""


def loss_of(output: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy, or squared error of numbers."""
    if y.is_floating_point():
        return nn.functional.mse_loss(output, y)
    return nn.functional.cross_entropy(output, y)


@torch.no_grad()
def score(model: nn.Module, data: Split) -> float:
    """Accuracy, or R² (at least 0)."""
    model.eval()
    output = torch.cat([model(x) for x in data.x.split(500)])
    model.train()
    if not data.y.is_floating_point():
        return float((output.argmax(1) == data.y).double().mean())
    unexplained = (output - data.y).square().mean() / (data.y - data.y.mean()).square().mean()
    return max(0.0, 1.0 - float(unexplained))


def operations_of(model: nn.Module, x: Tensor) -> float:
    """Operations of a training step per sample."""
    model.eval()  # so that no batch norm learns from it
    with counted_operations() as operations:
        model(x[:BATCH])
    model.train()
    return sum(operations) / len(x[:BATCH])


def widen_layers(
    model: nn.Module, factor: float, train: Split, optimizer: torch.optim.Optimizer, seed: int
) -> None:
    """Make every hidden layer ``factor`` times as wide."""
    if factor == 1.0:
        return
    model.eval()
    groups, _ = channel_groups(model, lambda: model(train.x[:4]))
    model.train()
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(len(train.x), generator=generator)[: BATCH * BATCHES].split(BATCH)
    batches = [(train.x[part], train.y[part]) for part in rows]

    def backward(network: nn.Module, batch: Any) -> None:
        loss_of(network(batch[0]), batch[1]).backward()

    for group in groups:
        count = round(group.channels * (factor - 1.0))
        if count:
            new, _ = propose(model, group, count, batches, backward, generator)
            widen(model, group, new, optimizer)


@dataclass
class Course:
    """What happens in a training beside its updates, and what it costs.

    Attributes:
        factors: by how much layers become wider before an epoch.
        curve: of each epoch the losses on training, while it learned, and on validation, and the
            score on validation.
        operations, per_epoch: multiplications and additions so far, and of an epoch.
    """

    model: nn.Module
    data: Split
    samples: int
    seed: int
    factors: dict[int, float] = field(default_factory=dict)
    curve: list[list[float]] | None = None
    operations: float = 0.0
    per_epoch: float = 0.0

    def before_epoch(self, epoch: int, optimizer: Optimizer) -> None:
        """Make layers wider, and count what the epoch will cost."""
        part = self.data.part(slice(self.samples))
        if epoch in self.factors:
            factor, seed = self.factors[epoch], self.seed + epoch
            with counted_operations() as choice:
                widen_layers(self.model, factor, part, optimizer, seed)
            self.operations += sum(choice)
        if epoch == 0 or epoch in self.factors:
            self.per_epoch = self.samples * operations_of(self.model, part.x)
        self.operations += self.per_epoch

    @torch.no_grad()
    def after_epoch(self, mean_loss: Tensor) -> None:
        """Note a point of the curve."""
        if self.curve is None:
            return
        part = self.data.part(slice(self.samples, self.samples + VALIDATION))
        self.model.eval()
        held_out_loss = loss_of(self.model(part.x), part.y)
        self.model.train()
        self.curve.append([float(mean_loss), float(held_out_loss), score(self.model, part)])


def train(
    model: nn.Module,
    host: Host,
    data: Split,
    epochs: int,
    order: int = 1,
    factors: dict[int, float] | None = None,
    rate: float = RATE,
    curve: list[list[float]] | None = None,
) -> dict[str, Any]:
    """Train a network of ``host`` in place by a plain loop with Adam and a cosine schedule.

    See ``Course`` for ``factors`` and ``curve``.

    Returns:
        scores on validation and test, parameters, operations, and seconds of the processor.
    """
    begin = process_time()
    seed, part = 1000 * order + host.seed, data.part(slice(host.samples))
    course = Course(model, data, host.samples, seed, factors or {}, curve)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    generator = torch.Generator().manual_seed(seed)
    for epoch in range(epochs):
        course.before_epoch(epoch, optimizer)
        losses = []
        for rows in torch.randperm(host.samples, generator=generator).split(BATCH):
            if len(rows) < 2:  # too few for a batch norm
                continue
            optimizer.zero_grad()
            loss = loss_of(model(part.x[rows]), part.y[rows])
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        schedule.step()
        course.after_epoch(torch.stack(losses).mean())
    seconds = process_time() - begin
    test = data.part(slice(host.samples + VALIDATION, None))
    return {
        "seconds": seconds,
        "validation": score(model, data.part(slice(host.samples, host.samples + VALIDATION))),
        "test": score(model, test),
        "parameters": parameter_count(model),
        "operations": course.operations,
    }


def circumstances(host: Host, small: nn.Module, data: Split) -> dict[str, Any]:
    """What a rule may know of a host: its shape, its data, and its scores as it arrives."""
    names = "data_name", "samples", "width", "depth", "epochs", "price", "training_price", "trained"
    return {name: getattr(host, name) for name in names} | {
        "architecture": host.architecture.__name__,
        "inputs": data.x.shape[1],
        "outputs": data.outputs,
        "parameters": parameter_count(small),
        "validation": score(small, data.part(slice(host.samples, host.samples + VALIDATION))),
        "training": score(small, data.part(slice(host.samples))),
    }


def utility(result: dict[str, Any], host: dict[str, Any], split: str = "test") -> float:
    """The utility of a result of a host, see ``training.utility``."""
    return utility_of(result, host, (host["price"], host["training_price"]), split)


def outcomes(
    host: Host, plans: Sequence[Plan], static_plans: Sequence[Plan] = STATICS
) -> dict[str, Any]:
    """Plans of a host, of which the first never grows, in two orders of its data; static networks
    in the first."""
    data, small = arrival(host)
    columns = [[play_plan(host, data, small, plan, order) for plan in plans] for order in (1, 2)]
    statics = [play_plan(host, data, small, plan, 1) for plan in static_plans]
    never = {"operations": columns[0][0]["operations"]}
    return circumstances(host, small, data) | never | {"plans": columns, "statics": statics}


def play_plan(
    host: Host,
    data: Split,
    small: nn.Module,
    plan: Plan,
    order: int,
    curve: list[list[float]] | None = None,
    rate: float = RATE,
) -> dict[str, Any]:
    """The result of a plan; ``small`` is the network as it arrives, see ``train``."""
    if plan.static:
        static = host.build(data, plan.static, order)
        return train(static, host, data, host.epochs, order, rate=rate)
    model = beginning(host, data, small, order)
    if plan.shrunk:
        model = shrink_and_perturb(small, host.build(data, seed=order), SHARE)
    first = 0 if host.trained else max(1, round(BEGIN * host.epochs))
    second = max(first + 1, round(AGAIN * host.epochs))
    factors = {second: plan.second, first: plan.first}
    return train(model, host, data, host.epochs, order, factors, rate, curve)


def all_outcomes(host: Host) -> dict[str, Any]:
    """All plans of a host, see ``outcomes``."""
    return outcomes(host, IN_PLACE if host.trained else SEQUENCES)


def looks(host: Host) -> list[list[list[float]]]:
    """The curves of training at each of ``FACTORS``, in the first order of the data."""
    data, small = arrival(host)
    curves: list[list[list[float]]] = [[] for _ in FACTORS]
    for factor, curve in zip(FACTORS, curves, strict=True):
        play_plan(host, data, small, Plan(factor), 1, curve)
    return curves


def short_statics(host: Host, data: Split) -> list[dict[str, Any]]:
    """The static networks trained for a fifth of the epochs: together as long as one training."""
    epochs = max(1, round(host.epochs / len(FACTORS)))
    return [train(host.build(data, factor, 1), host, data, epochs) for factor in FACTORS]


def further(host: Host) -> dict[str, Any]:
    """What a sceptic runs first, in the first order of the data.

    Of a host from scratch ``short_statics``; of a trained one, all statics and all widenings in
    place at ``RATES``.
    """
    data, small = arrival(host)
    if not host.trained:
        return {"short": short_statics(host, data)}
    rates: dict[str, Any] = {"statics": [], "in_place": []}
    for rate in RATES:
        statics, in_place = [], []
        for factor in FACTORS:
            static = host.build(data, factor, 1)
            statics.append(train(static, host, data, host.epochs, rate=rate))
            model, factors = deepcopy(small), {0: factor}
            in_place.append(train(model, host, data, host.epochs, 1, factors, rate))
        rates["statics"].append(statics)
        rates["in_place"].append(in_place)
    return rates


def kept_shares(host: Host) -> list[list[dict[str, Any]]]:
    """A trained host widened by the table, after so much of its weights was kept, at two rates.

    The columns are those of ``SHARES``, and a new network of that size.
    """
    data, small = arrival(host)
    counts = [parameter_count(host.build(data, factor)) for factor in FACTORS]
    plans = [[{"parameters": count} for count in counts]]
    factor = FACTORS[by_table(GAINS)(circumstances(host, small, data) | {"plans": plans})]
    fresh, epochs, table = host.build(data, seed=1), host.epochs, []
    for rate in (RATE, RATES[1]):
        row = []
        for share in SHARES:
            model = shrink_and_perturb(small, fresh, share)
            row.append(train(model, host, data, epochs, 1, {0: factor}, rate))
        row.append(train(host.build(data, factor, 1), host, data, epochs, rate=rate))
        table.append(row)
    return table
