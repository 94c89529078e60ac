"""How new channels of a group start: those of many random ones that explain the gradient best.

Candidates get random incoming weights and outgoing weights of 0, as in Firefly (Wu et al., 2020).
The gradient of a candidate's outgoing weights is the correlation of its activation with what is
left of the gradient at the layers behind. Channels are taken one after the other, each by the
decrease of the squared gradient that no channel before it explains: orthogonal matching pursuit, in
the space in which TINY (Verbockhaven et al., 2024) takes singular vectors, as GradMax (Evci et
al., 2022) does without the correlations. Behind a norm of all channels there is no such choice:
the new ones are copies of those that are there, and turn into random ones.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

from esper.kasmina.channel_groups import ChannelGroup
from esper.kasmina.layer_kinds import Recurrent, free_weights, layer_at, rows_first
from esper.kasmina.new_channels import (
    NewChannels,
    channel_count,
    ends_of,
    joined,
    present_channels,
    random_channels,
)
from esper.kasmina.wider_layers import widen
from esper.own_models.samples import random_state_kept

CANDIDATES, MORE = 256, 1024
"""Least number of random channels, and most beyond the new ones, which are taken from them."""
BATCHES = 4
"""Minibatches on which they are compared."""
ROWS = 8192
"""Positions of the activation by which the correlations of channels are measured."""

Record = tuple[list[Tensor], list[Tensor], list[Tensor]]
"""What a layer reads, and the gradients of what it writes, minibatch by minibatch; its weights."""
Backward = Callable[[nn.Module, Any], None]
"""Computes the gradients of the loss of a batch, added to those that are there."""


def propose(
    model: nn.Module, group: ChannelGroup, count: int, batches: Sequence[Any],
    backward: Backward, generator: torch.Generator,
) -> tuple[NewChannels, float]:  # fmt: skip
    """The best new channels of a group.

    Args:
        model: the module; it stays as it is, and so do the global generators.
        group: one of its groups.
        count: number of channels.
        batches: minibatches of the training data.
        backward: see ``Backward``.
        generator: draws the candidates.

    Returns:
        the channels, and how much of the squared gradient behind the group they explain that those
        before them do not, in [0, 1], to first order; 0 where it is not known.
    """
    trial = copy.deepcopy(model)
    if group.is_balanced:
        from esper.kasmina.copied_channels import balanced_channels  # most have no such norm

        candidates = balanced_channels(model, group, count, generator)
    else:
        number = max(CANDIDATES * group.channels // group.width, min(4 * count, count + MORE))
        number = number if group.readers else count  # there is nothing to compare them by
        candidates = random_channels(trial, group, number, group.channels + count, generator)
    widen(trial, group, candidates)
    trial.requires_grad_(False)
    records, weights = dict[str, Record](), dict[str, Tensor]()
    with random_state_kept(), torch.enable_grad(), ExitStack() as stack:
        for name in group.readers:
            layer, tensors = layer_at(trial, name)
            if name in group.axes:
                weights[name] = tensors[0][2].requires_grad_()
            elif not isinstance(layer, nn.MultiheadAttention):  # no hook sees its products
                records[name] = [], [], free_weights(layer)
                hook = layer.register_forward_hook(_keep(*records[name][:2]))
                stack.callback(hook.remove)
        if weights:
            from esper.kasmina.user_weights import Readings  # most modules have none

            stack.enter_context(Readings(weights, records))
        for batch in batches:
            backward(trial, batch)
    index, share = _pursuit(trial, group, count, records)
    if group.is_balanced:
        return candidates, share
    new = _with_statistics(trial, group, candidates).choice(index)
    return joined(model, group, new, generator), share


def _with_statistics(model: nn.Module, group: ChannelGroup, new: NewChannels) -> NewChannels:
    """The channels with the running statistics that the batch norms measured of them."""
    entries = dict(new.entries)
    for full, values in present_channels(model, group):
        if full.endswith((".running_mean", ".running_var")):
            entries[full] = values[-new.count :].clone()
    return NewChannels(entries, new.count)


def _keep(activations: list[Tensor], gradients: list[Tensor]) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, Tensor) and not isinstance(module, Recurrent):
            if not output.requires_grad:
                return
            output.register_hook(lambda gradient: gradients.append(gradient.detach()))
        activations.append(inputs[0].data.detach())  # of a packed sequence, too

    return hook


def _pursuit(
    model: nn.Module, group: ChannelGroup, count: int, records: dict[str, Record]
) -> tuple[Tensor, float]:
    """The indices of candidates, and the share of the squared gradient that they explain."""
    # A layer that stochastic depth skips has no gradient, and any channels are as good.
    active = {name: x for name, x in records.items() if x[0] and x[2][0].grad is not None}
    readers = [_Reader(model, name, group, count, x) for name, x in active.items()]
    if not active:
        return torch.arange(count), 0.0
    total, indices = sum(reader.remainder for reader in readers), list[int]()
    while len(indices) < count:
        gains = torch.stack([reader.gains() for reader in readers]).sum(0)
        gains[indices] = -1.0
        if gains.max() <= 0.0:  # a few samples tell no more of them apart
            indices += (gains == 0.0).nonzero()[: count - len(indices), 0].tolist()
            break
        indices.append(int(gains.argmax()))
        for reader in readers:
            reader.explain(indices[-1])
    remainder = sum(reader.remainder for reader in readers)
    # No hook sees the gradient at what a recurrent layer computes of its inputs.
    is_known = total > 0.0 and all(x[1] for x in active.values())
    share = 1.0 - remainder / total if is_known else 0.0
    return torch.tensor(indices), min(max(share, 0.0), 1.0)


class _Reader:
    """Candidates that a layer reads, and their gradients, less what is explained already.

    Products of all pairs are computed once, and of what is explained only rows, as in batch
    orthogonal matching pursuit (Rubinstein, Zibulevsky and Elad, 2008). A kernel's shifted copies
    of a channel are taken as equally correlated.
    """

    def __init__(
        self, model: nn.Module, name: str, group: ChannelGroup, count: int, record: Record
    ):
        layer, block, axes = layer_at(model, name)[0], group.readers[name], group.axes.get(name)
        # Of a concatenation, what is of the group, channel by channel.
        ends, channels = ends_of(model, group, name), channel_count(model, group)
        indices = torch.stack([torch.arange(end - channels, end) for end in ends], 1)
        columns = (indices[..., None] * block + torch.arange(block)).flatten()
        grads = [each.grad for each in record[2] if each.grad is not None]
        gradient = torch.cat([rows_first(layer, x, axes=axes) for x in grads]).double()[:, columns]
        rank = record[2][0].ndim if axes is None else 2  # that of the weight which reads
        axis = record[0][0].ndim - rank + 1
        inputs = torch.cat([x.movedim(axis, -1).reshape(-1, x.shape[axis]) for x in record[0]])
        outputs = sum(float(g.double().square().sum()) for g in record[1])
        samples = max(len(inputs), 1)
        entries = inputs[:: -(-samples // ROWS)].double()[:, columns]  # at most ROWS, evenly spread
        # Position by position of a flattened map, a channel is one variable; a head has several.
        several = len(ends) if len(ends) <= 4 else 1  # a flattened sequence has it at each step
        self.variables = several * gcd(block, group.width // group.channels)
        number, block = channels * self.variables, len(ends) * block // self.variables
        entries = entries.view(len(entries), number, block).movedim(1, 2).reshape(-1, number)
        gradient = gradient.reshape(len(gradient), number, block, -1)
        gradient = gradient.movedim(1, -1).reshape(-1, number) / samples
        old = group.channels * self.variables
        self.least = 1e-12 * float(entries.square().mean(0).max())
        host, entries = (entries / len(entries) ** 0.5).tensor_split([old], 1)
        by_sample = len(host) < old
        values, vectors = torch.linalg.eigh(host @ host.T if by_sample else host.T @ host)
        values, vectors = values[values > self.least], vectors[:, values > self.least]
        whitening = host.T @ (vectors / values) if by_sample else vectors / values.sqrt()
        basis = (host @ whitening).T @ entries
        reduction = gradient[:, :old] @ whitening
        gradient = gradient[:, old:] - reduction @ basis
        self.factors, self.size = (entries, basis, gradient), 0
        self.variance, common, self.squares = (x.square().sum(0) for x in self.factors)
        self.variance -= common
        self.rows = entries.new_empty(2, count * self.variables, number - old)
        self.remainder = outputs / samples - float(reduction.square().sum())

    def explain(self, channel: int) -> None:
        """Take what a candidate explains out of all others."""
        for each in range(self.variables * channel, self.variables * (channel + 1)):
            if self.variance[each] <= self.least:
                continue
            if not self.size:
                entries, basis, gradient = (x.T @ x for x in self.factors)
                self.covariance, self.products = entries - basis, gradient
            deviation, (rows, halves) = self.variance[each].sqrt(), self.rows[:, : self.size]
            row = (self.covariance[each] - rows.T @ rows[:, each]) / deviation
            product = self.products[each] - rows.T @ halves[:, each] - halves.T @ rows[:, each]
            decrease = float(product[each] / self.variance[each])
            self.remainder -= decrease
            # Gradients lose their product with this candidate's, over its deviation, times row.
            half = product / deviation - 0.5 * decrease * row
            self.squares -= 2.0 * half * row
            self.variance -= row.square()
            self.rows[0, self.size], self.rows[1, self.size] = row, half
            self.size += 1

    def gains(self) -> Tensor:
        """What each candidate explains of the squared gradient, ``[C]``; of a head, the sum of what
        each of its variables would alone."""
        limit = max(1e-8 * float(self.variance.max()), self.least)
        gain = self.squares.clamp(min=0.0) / self.variance
        return torch.where(self.variance > limit, gain, 0.0).view(-1, self.variables).sum(1)
