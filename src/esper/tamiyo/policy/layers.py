"""Layers of the policies that compute single steps faster while their weights are frozen."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from esper.kasmina.transfer import cached_tensor


class Head(nn.Module):
    """Two linear layers with a ReLU between them."""

    def __init__(self, inputs: int, hidden: int, outputs: int):
        super().__init__()
        self.hidden = nn.Linear(inputs, hidden)
        self.out = nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., inputs]`` to ``[..., outputs]``."""
        return self.out(self.hidden(x).relu())


class PackingLayer(nn.Module):
    """A layer that computes with weights derived from its parameters, and can cache these."""

    _packed: Sequence[Tensor] | None = None

    def packed_weights(self) -> Sequence[Tensor]:
        """The derived weights."""
        raise NotImplementedError

    def pack(self) -> None:
        """Cache the derived weights for calls without gradients, until ``unpack``."""
        with torch.no_grad():
            self._packed = self.packed_weights()

    def unpack(self) -> None:
        """Discard the cached weights."""
        self._packed = None


class StepwiseLSTM(PackingLayer, nn.LSTM):
    """An LSTM of one layer that computes single steps without gradients as a cell.

    On a CPU ``nn.LSTM`` reorders its weights in every call, which costs more than a single step.
    """

    def packed_weights(self) -> list[Tensor]:
        """Weights stored column by column: products with few rows take a third less time so."""
        return [w.t().contiguous().t() if w.ndim == 2 else w for w in self.cell_weights()]

    def cell_weights(self) -> list[Tensor]:
        """Weights for input and hidden state, then their biases."""
        parts = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        return [self.get_parameter(f"{part}_l0") for part in parts]

    def run(
        self, features: Tensor, hidden: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Outputs ``[T, N, width]``, and the state after the last step; see ``Policy.run_lstm``."""
        device = features.device.type
        # Under autocast acting must compute with the same layer as learning.
        if len(features) > 1 or torch.is_grad_enabled() or torch.is_autocast_enabled(device):
            return self(features, hidden)
        weights = self._packed or self.cell_weights()
        h, c = torch.lstm_cell(features[0], [state[0] for state in hidden], *weights)
        return h[None], (h[None], c[None])


class ParallelHeads(PackingLayer, nn.ModuleDict):
    """Linear maps of one input, computed as one map to padded options.

    Args:
        inputs: width of the input.
        widths: options of each head by name.
    """

    def __init__(self, inputs: int, widths: Mapping[str, int]):
        super().__init__({head: nn.Linear(inputs, width) for head, width in widths.items()})
        begins = [sum(list(widths.values())[:i]) for i in range(len(widths))]
        # Padding repeats the first row; masks exclude it.
        self._rows = tuple(
            begin + i if i < width else 0
            for begin, width in zip(begins, widths.values(), strict=True)
            for i in range(max(widths.values()))
        )

    def linears(self) -> list[nn.Linear]:
        """The linear layer of each head."""
        return [layer for layer in self.values() if isinstance(layer, nn.Linear)]

    def packed_weights(self) -> list[Tensor]:
        """Weight and bias of the one map."""
        layers = self.linears()
        if len(layers) == 1:
            return [layers[0].weight, layers[0].bias]
        rows = cached_tensor(self._rows, layers[0].weight.device)
        weight = torch.cat([layer.weight for layer in layers])
        bias = torch.cat([layer.bias for layer in layers])
        return [weight.index_select(0, rows), bias.index_select(0, rows)]

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[..., heads, widest]`` of ``x [..., inputs]``; the caller masks the padding."""
        packing = None if torch.is_grad_enabled() else self._packed
        logits = nn.functional.linear(x, *(packing or self.packed_weights()))
        return logits.unflatten(-1, (len(self), -1))
