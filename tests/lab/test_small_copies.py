"""Copies that train few numbers, against one host and torch's own optimizer at a time."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from esper.kasmina.hosts.cnn import CnnHost
from esper.tolaria.backends import Minibatches, Optimisation
from esper.tolaria.backends.torch import Network, TorchBackend, cross_entropy
from esper.tolaria.plan import Seeds
from esper.tolaria.precision import Precision
from esper.tolaria.stores import Stack
from esper_lab.baselines import play_baseline
from esper_lab.plans import NEVER
from esper_lab.play import play_plans
from esper_lab.small_copies import CHANGES, SmallCopies
from tiny_population import hosts

HOST = CnnHost((3, 4), classes=10, image=(8, 8, 1))
N, EPOCHS, RATES, F64 = 3, 2, (0.01, 0.03, 0.1), torch.float64


def stack_of_hosts() -> Stack:
    stack = Stack.allocate(
        N, HOST.layout.size, HOST.buffers.size, [1] * 2, F64, torch.device("cpu")
    )
    draws = torch.Generator().manual_seed(3)
    for store, layout in ((stack.host, HOST.layout), (stack.buffers, HOST.buffers)):
        rows = [
            torch.cat([f.initial(draws).flatten() + 0.01 for f in layout.fields]) for _ in range(N)
        ]
        store.copy_(torch.stack(rows))
    return stack


def no_seeds() -> Seeds:
    nothing = torch.zeros(N, len(HOST.slots), dtype=torch.long)
    return Seeds(nothing.bool(), nothing, nothing, nothing.to(F64), nothing.bool())


def minibatches(epoch: int) -> Minibatches:
    draws = torch.Generator().manual_seed(epoch)
    images = torch.randn(40, 8, 8, 1, generator=draws, dtype=F64)
    labels = torch.randint(10, (40,), generator=draws)
    return Minibatches(images, labels, torch.randint(40, (N, 4, 16), generator=draws))


def naive(name: str, stack: Stack, row: int) -> Tensor:
    """The parameters of a host that is trained alone."""
    backend = TorchBackend(HOST, Precision("cpu"))
    weights = {n: x[row].clone() for n, x in HOST.layout.views(stack.host).items()}
    buffers = HOST.buffers.views(stack.buffers[row : row + 1].clone())
    factors: dict[str, tuple[Tensor, Tensor]] = {}
    rate = RATES[row]
    if "LoRA" in name:
        rank = int(name.removeprefix("rank-")[0])
        draws = torch.Generator().manual_seed(0)
        for n, x in weights.items():
            if x.ndim > 1:
                columns = x[0].numel()
                first = torch.rand(rank * columns, generator=draws).mul(2.0).sub(1.0)
                first = (first * columns**-0.5).view(rank, columns).to(F64)
                factors[n] = first, torch.zeros(len(x), rank, dtype=F64)
        leaves = [(x, rate) for pair in factors.values() for x in pair]
    else:
        leaves = [(x, rate) for n, x in weights.items() if n.startswith("head")]
        leaves += [(x, 0.1 * rate) for n, x in weights.items() if n.startswith("norm")]
    parameters = [x.requires_grad_() for x, _ in leaves]
    groups = [{"params": [x], "lr": each} for x, each in leaves]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    for epoch in range(EPOCHS):
        for images, labels in minibatches(epoch):
            now = {
                n: x + (factors[n][1] @ factors[n][0]).view_as(x) if n in factors else x
                for n, x in weights.items()
            }
            network = Network({n: x[None] for n, x in now.items()}, buffers, {}, [None, None])
            logits = backend._forward(network, images[:, :, :, row : row + 1], training=True)
            optimizer.zero_grad()
            cross_entropy(logits, labels[row : row + 1]).sum().backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
    for n, (first, second) in factors.items():
        weights[n] = weights[n] + (second @ first).view_as(weights[n])
    return torch.cat([x.detach().flatten() for x in weights.values()])


@pytest.mark.parametrize("name", CHANGES)
def test_every_host_is_trained_as_alone_and_the_rest_of_it_stays(name: str) -> None:
    stack = stack_of_hosts()
    initial = stack.host.clone()
    alone = torch.stack([naive(name, stack, row) for row in range(N)])
    backend = SmallCopies(name, HOST, TorchBackend(HOST, Precision("cpu")))
    optimisation = Optimisation(torch.tensor(RATES, dtype=F64), torch.zeros(N, 2), 0.0, 1.0)
    for epoch in range(EPOCHS):
        result = backend.train_epoch(stack, no_seeds(), minibatches(epoch), optimisation)
    torch.testing.assert_close(stack.host, alone, rtol=1e-7, atol=1e-9)
    assert bool(result.loss.isfinite().all())
    before, after = HOST.layout.views(initial), HOST.layout.views(stack.host)
    changes = {field for field in before if not torch.equal(before[field], after[field])}
    weights = {field for field, x in before.items() if x.ndim > 2}
    others = before.keys() - weights | {"head.weight"}
    assert changes == (weights if "LoRA" in name else others)


@pytest.mark.parametrize("name", CHANGES)
def test_hosts_with_permuted_labels_learn_and_pay_for_what_is_stored(name: str) -> None:
    population = hosts(4, data_seed=1)
    outcome = play_baseline(name, population, (1.0, 3.0))
    frozen = play_plans(population, (NEVER,)).test_score[:, 0]
    assert (outcome.test_score.max(1) > frozen + 0.02)[1::2].all()
    assert np.isfinite(outcome.test_score).all()
