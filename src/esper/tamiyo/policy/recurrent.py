"""A recurrent policy over flat features: an encoder, a memory and independent heads.

This is the policy for tasks other than growing networks. Its heads are sampled independently, given
the output of the memory.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from esper.tamiyo.policy.action_masks import MaskedCategorical, padded_columns
from esper.tamiyo.policy.interface import Evaluation, Policy, RecurrentState, full_precision, upcast


@dataclass(frozen=True, slots=True)
class FlatObservation:
    """Observation of a task; leading axes ``[...]`` are ``[N]`` or ``[T, N]``.

    Attributes:
        features: ``[..., inputs]``.
        masks: legal options, bool ``[..., heads, widest]``; false beyond the options of a head.
    """

    features: Tensor
    masks: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """See ``TensorRecord.tensors``."""
        return {"features": self.features, "masks": self.masks}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Self:
        """See ``TensorRecord.from_tensors``."""
        return cls(**tensors)

    def to(self, device: torch.device) -> Self:
        """A copy on ``device``."""
        return type(self)(self.features.to(device), self.masks.to(device))


class Trunk(nn.Module):
    """Encoder and memory.

    Args:
        inputs: number of features of an observation.
        encoder: width of the encoder.
        memory: width of the LSTM; 0 for no LSTM.
    """

    def __init__(self, inputs: int, encoder: int, memory: int):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(inputs, encoder), nn.Tanh())
        self.lstm = nn.LSTM(encoder, memory) if memory else None
        self.width = memory or encoder
        self._cell: list[Tensor] | None = None

    def run_lstm(self, features: Tensor, hidden: RecurrentState) -> tuple[Tensor, RecurrentState]:
        """Output ``[T, N, width]`` for encoded features, and the state after the last step."""
        if self.lstm is None:
            return features, ()
        if len(features) == 1 and not torch.is_grad_enabled() and not self._autocasts(features):
            return self._step(self._cell or cell_weights(self.lstm), features[0], hidden)
        return self.lstm(features, hidden)

    def cache_weights(self) -> None:
        """Cache the LSTM weights in the fastest layout for single steps, until ``discard_weights``.

        With weights stored column by column, a matrix product with few rows takes a third less
        time and gives the same bits.
        """
        if self.lstm is not None:
            self._cell = [
                weight.t().contiguous().t() if weight.ndim == 2 else weight
                for weight in cell_weights(self.lstm)
            ]

    def discard_weights(self) -> None:
        """Discard the weights cached by ``cache_weights``."""
        self._cell = None

    def _autocasts(self, features: Tensor) -> bool:
        return torch.is_autocast_enabled(features.device.type)

    def _step(
        self, weights: list[Tensor], features: Tensor, hidden: RecurrentState
    ) -> tuple[Tensor, RecurrentState]:
        """One step of the LSTM as a cell.

        On a CPU ``nn.LSTM`` repacks its weights in every call, which costs more than a single step.
        Not used under autocast: acting must compute with the same layer as learning.
        """
        h, c = torch.lstm_cell(features, [state[0] for state in hidden], *weights)
        h, c = h[None], c[None]
        return h, (h, c)


def cell_weights(lstm: nn.LSTM) -> list[Tensor]:
    """Weights for input and hidden state, then their biases."""
    parts = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    return [lstm.get_parameter(f"{part}_l0") for part in parts]


class RecurrentPolicy(Policy[FlatObservation]):
    """Actor and critic over ``FlatObservation``.

    Args:
        inputs: number of features of an observation.
        options: number of options of each head.
        memory: width of the LSTM; 0 for no LSTM, so that the policy sees only the current step.
        shared: whether actor and critic share a trunk. A shared trunk costs half as much; with
            separate trunks the critic's gradients do not change the actor's features.
        encoder: width of the encoder.
        head: hidden units of the actor's and of the critic's head.
    """

    def __init__(
        self,
        inputs: int,
        options: tuple[int, ...],
        memory: int = 64,
        shared: bool = False,
        encoder: int = 64,
        head: int = 64,
    ):
        super().__init__()
        single = len(options) == 1
        self.heads = ("action",) if single else tuple(f"action_{i}" for i in range(len(options)))
        self.memory_width = memory
        self.trunks = nn.ModuleList(
            Trunk(inputs, encoder, memory) for _ in range(1 if shared else 2)
        )
        width = memory or encoder
        self.actor = nn.Sequential(nn.Linear(width, head), nn.Tanh())
        self.action_heads = nn.ModuleList(nn.Linear(head, count) for count in options)
        self.value_head = nn.Sequential(nn.Linear(width, head), nn.Tanh(), nn.Linear(head, 1))
        # Padding reads the first column and is masked.
        columns = torch.tensor(padded_columns(options, padding=0))
        self.register_buffer("places", columns, persistent=False)
        self._options: tuple[Tensor, Tensor] | None = None
        self._initialise()

    def _initialise(self) -> None:
        """Orthogonal weights, zero biases and a nearly uniform policy.

        See Huang et al., "The 37 implementation details of proximal policy optimization", 2022.
        The LSTM keeps torch's initialisation: with orthogonal weights and a forget-gate bias of 1,
        learning masked CartPole took a third longer.
        """
        for name, parameter in self.named_parameters():
            if "lstm" in name:
                continue
            if parameter.ndim == 2:
                nn.init.orthogonal_(parameter, 2**0.5)
            else:
                nn.init.zeros_(parameter)
        with torch.no_grad():
            for layer in self._action_layers():
                layer.weight.mul_(0.01 / 2**0.5)
            self.value_layer().weight.div_(2**0.5)

    def _action_layers(self) -> list[nn.Linear]:
        return [layer for layer in self.action_heads if isinstance(layer, nn.Linear)]

    def _trunks(self) -> list[Trunk]:
        """The actor's trunk, and the critic's if it is separate."""
        return [trunk for trunk in self.trunks if isinstance(trunk, Trunk)]

    def initial_hidden(self, environments: int) -> RecurrentState:
        """See ``Policy.initial_hidden``: hidden state and cell state of each trunk."""
        if not self.memory_width:
            return ()
        zeros = next(self.parameters()).new_zeros(1, environments, self.memory_width)
        return tuple(zeros.clone() for _ in range(2 * len(self.trunks)))

    def head_parameters(self, head: str) -> list[nn.Parameter]:
        """See ``Policy.head_parameters``."""
        if head != "value":
            return list(self.action_heads[self.heads.index(head)].parameters())
        trunks = self._trunks()[1:]
        return [p for module in (*trunks, self.value_head) for p in module.parameters()]

    def value_layer(self) -> nn.Linear:
        """See ``Policy.value_layer``."""
        last = self.value_head[-1]
        assert isinstance(last, nn.Linear)
        return last

    def noise_shape(self, observation: FlatObservation) -> tuple[int, int]:
        """See ``Policy.noise_shape``."""
        heads, widest = observation.masks.shape[-2:]
        return heads, widest

    def encode(self, observation: FlatObservation) -> tuple[Tensor, ...]:
        """Inputs of all memories, concatenated, ``[..., trunks * encoder]``."""
        with self.trunk_precision(observation.features.device):
            outputs = [trunk.encoder(observation.features) for trunk in self._trunks()]
            return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1),)

    def run_lstm(self, features: Tensor, hidden: RecurrentState) -> tuple[Tensor, RecurrentState]:
        """See ``Policy.run_lstm``; outputs are concatenated, ``[T, N, trunks * width]``."""
        trunks = self._trunks()
        outputs: list[Tensor] = []
        after: list[Tensor] = []
        with self.trunk_precision(features.device):
            for i, (trunk, part) in enumerate(
                zip(trunks, features.chunk(len(trunks), -1), strict=True)
            ):
                output, state = trunk.run_lstm(part, hidden[2 * i : 2 * i + 2])
                outputs.append(output)
                after += state
        memory = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
        return upcast(memory), tuple(upcast(state) for state in after)

    @contextmanager
    def frozen_weights(self) -> Iterator[None]:
        """See ``Policy.frozen_weights``.

        Weights are cached only on a CPU: a captured CUDA graph would read the cached weights even
        after an update.
        """
        if self.get_buffer("places").device.type != "cpu":
            yield
            return
        with torch.no_grad():
            self._options = self._option_weights()
            for trunk in self._trunks():
                trunk.cache_weights()
        try:
            yield
        finally:
            self._options = None
            for trunk in self._trunks():
                trunk.discard_weights()

    def evaluate_heads(
        self,
        memory: Tensor,
        encoding: tuple[Tensor, ...],
        observation: FlatObservation,
        actions: Tensor,
    ) -> Evaluation:
        """See ``Policy.evaluate_heads``. All heads share one padded log-softmax."""
        with full_precision(memory.device):
            distribution = self._distribution(memory, observation)
            log_prob = distribution.log_prob(actions).sum(-1)
            choice = observation.masks.sum(-1) > 1
            return Evaluation(log_prob, distribution.entropy(), choice, self._value(memory))

    @torch.no_grad()
    def act(
        self, observation: FlatObservation, hidden: RecurrentState, noise: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, RecurrentState]:
        """See ``Policy.act``."""
        (features,) = self.encode(observation)
        memory, hidden = self.run_lstm(features[None], hidden)
        memory = memory[0]
        with full_precision(memory.device):
            distribution = self._distribution(memory, observation)
            actions = distribution.mode if noise is None else distribution.sample(noise)
            log_prob = distribution.log_prob(actions).sum(-1)
            return actions, log_prob, self._value(memory), hidden

    def _distribution(self, memory: Tensor, observation: FlatObservation) -> MaskedCategorical:
        """Distribution over the options of every head, ``[..., heads, widest]``."""
        packed = None if torch.is_grad_enabled() else self._options
        actor_memory = memory.chunk(len(self.trunks), -1)[0]
        logits = nn.functional.linear(self.actor(actor_memory), *(packed or self._option_weights()))
        return MaskedCategorical(
            logits[..., self.get_buffer("places")], observation.masks, validate=False
        )

    def _option_weights(self) -> tuple[Tensor, Tensor]:
        """Weight and bias of one linear map to the concatenated options of all heads."""
        layers = self._action_layers()
        weights, biases = zip(*((layer.weight, layer.bias) for layer in layers), strict=True)
        return torch.cat(weights), torch.cat(biases)

    def _value(self, memory: Tensor) -> Tensor:
        return self.value_head(memory.chunk(len(self.trunks), -1)[-1])[..., 0].float()
