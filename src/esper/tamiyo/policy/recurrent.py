"""A recurrent policy over flat features: an encoder, a memory and independent heads.

This is the policy for tasks other than growing networks. Its heads, and the components of Box
actions, are sampled independently, given the output of the memory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
from torch import Tensor, nn

from esper.tamiyo.policy.action_masks import MaskedCategorical
from esper.tamiyo.policy.distributions import HIGHEST, LOWEST, ActionDistribution, SquashedNormal
from esper.tamiyo.policy.interface import Evaluation, Policy, RecurrentState, full_precision, upcast
from esper.tamiyo.policy.layers import ParallelHeads, StepwiseLSTM

NUMBERS = "numbers"
"""Name of the head of all components of Box actions."""

_MEMORY_GAIN = 4.0
"""Factor of the LSTM's output, which begins about so much smaller than the encoding: its gates are
half closed, and Adam learns faster from large features."""


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
        encoder: encodes the features of an observation.
        width: width of its output.
        memory: width of the LSTM; 0 for no LSTM.
    """

    def __init__(self, encoder: nn.Module, width: int, memory: int):
        super().__init__()
        self.encoder, self.width = encoder, width
        self.lstm = StepwiseLSTM(width, memory) if memory else None

    def run_lstm(self, features: Tensor, hidden: RecurrentState) -> tuple[Tensor, RecurrentState]:
        """Output ``[T, N, width]`` for encoded features, and the state after the last step."""
        if self.lstm is None:
            return features, ()
        output, state = self.lstm.run(features, hidden)
        return _MEMORY_GAIN * output, state


class RecurrentPolicy(Policy[FlatObservation]):
    """Actor and critic over ``FlatObservation``.

    The actor's head sees the encoding beside the output of the memory, so that what the current
    observation says need not pass through the memory.

    Args:
        inputs: number of features of an observation.
        options: number of options of each head.
        memory: width of the LSTM; 0 for no LSTM, so that the policy sees only the current step.
        shared: whether actor and critic share a trunk. A shared trunk costs half as much; with
            separate trunks the critic's gradients do not change the actor's features.
        encoder: width of the encoder, a linear layer; or makes another and tells its width. That
            keeps its initial weights.
        head: hidden units of the actor's and of the critic's head.
        components: number of components of Box actions.
    """

    def __init__(
        self,
        inputs: int,
        options: tuple[int, ...],
        memory: int = 64,
        shared: bool = False,
        encoder: int | Callable[[], tuple[nn.Module, int]] = 64,
        head: int = 64,
        components: int = 0,
    ):
        super().__init__()
        single = len(options) == 1
        names = ("action",) if single else tuple(f"action_{i}" for i in range(len(options)))
        self.heads = (*names, NUMBERS) if components else names
        self.head_count, self.memory_width = len(options), memory

        def linear(width: int) -> tuple[nn.Module, int]:
            return nn.Sequential(nn.Linear(inputs, width), nn.Tanh()), width

        make = partial(linear, encoder) if isinstance(encoder, int) else encoder
        self.own_encoder = not isinstance(encoder, int)
        self.trunks = nn.ModuleList(Trunk(*make(), memory) for _ in range(1 if shared else 2))
        width = memory or self._trunks()[0].width
        actor_width = width + (self._trunks()[0].width if memory else 0)
        self.actor = nn.Sequential(nn.Linear(actor_width, head), nn.Tanh())
        widths = {str(i): n for i, n in enumerate(options)}
        self.action_heads = ParallelHeads(head, widths) if options else None
        self.means = nn.Linear(head, components) if components else None
        if components:
            self.log_deviation = nn.Parameter(torch.zeros(components))
        self.value_head = nn.Sequential(nn.Linear(width, head), nn.Tanh(), nn.Linear(head, 1))
        self._initialise()

    def _initialise(self) -> None:
        """Orthogonal weights, zero biases and a nearly uniform policy.

        See Huang et al., "The 37 implementation details of proximal policy optimization", 2022.
        The LSTM keeps torch's initialisation: with orthogonal weights and a forget-gate bias of 1,
        learning masked CartPole took a third longer.
        """
        for name, parameter in self.named_parameters():
            if "lstm" in name or (self.own_encoder and ".encoder." in name):
                continue
            if parameter.ndim == 2:
                nn.init.orthogonal_(parameter, 2**0.5)
            else:
                nn.init.zeros_(parameter)
        with torch.no_grad():
            heads = [] if self.action_heads is None else self.action_heads.linears()
            for layer in (*heads, *([] if self.means is None else [self.means])):
                layer.weight.mul_(0.01 / 2**0.5)
            self.value_layer().weight.div_(2**0.5)

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
        if head == NUMBERS:
            assert self.means is not None
            return [*self.means.parameters(), self.log_deviation]
        if head != "value":
            assert self.action_heads is not None
            return list(self.action_heads[str(self.heads.index(head))].parameters())
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
        return heads + (0 if self.means is None else self.means.out_features), widest

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

    def evaluate_heads(
        self,
        memory: Tensor,
        encoding: tuple[Tensor, ...],
        observation: FlatObservation,
        actions: Tensor,
    ) -> Evaluation:
        """See ``Policy.evaluate_heads``. All heads share one padded log-softmax."""
        with full_precision(memory.device):
            distribution = self._distribution(memory, encoding[0], observation)
            choice = observation.masks.sum(-1) > 1
            if self.means is not None:
                choice = torch.cat([choice, torch.ones_like(memory[..., :1], dtype=torch.bool)], -1)
            entropy, value = distribution.entropy(), self._value(memory)
            return Evaluation(distribution.log_prob(actions), entropy, choice, value)

    @torch.no_grad()
    def act(
        self, observation: FlatObservation, hidden: RecurrentState, noise: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, RecurrentState]:
        """See ``Policy.act``."""
        (features,) = self.encode(observation)
        memory, hidden = self.run_lstm(features[None], hidden)
        memory = memory[0]
        with full_precision(memory.device):
            distribution = self._distribution(memory, features, observation)
            actions = distribution.sample(noise)
            return actions, distribution.log_prob(actions), self._value(memory), hidden

    def _distribution(
        self, memory: Tensor, encoding: Tensor, observation: FlatObservation
    ) -> ActionDistribution:
        inputs = self._part(memory, 0)
        if self.memory_width:
            inputs = torch.cat([inputs, upcast(self._part(encoding, 0))], -1)
        features = self.actor(inputs)
        options = numbers = None
        if self.action_heads is not None:
            logits = self.action_heads(features)
            options = MaskedCategorical(logits, observation.masks, validate=False)
        if self.means is not None:
            log_deviation = self.log_deviation.clamp(LOWEST, HIGHEST)
            numbers = SquashedNormal(self.means(features).float(), log_deviation)
        return ActionDistribution(options, numbers, self.head_count)

    def _part(self, memory: Tensor, trunk: int) -> Tensor:
        """The output of a trunk."""
        return memory if len(self.trunks) == 1 else memory.chunk(2, -1)[trunk]

    def _value(self, memory: Tensor) -> Tensor:
        return self.value_head(self._part(memory, -1)).squeeze(-1).float()
