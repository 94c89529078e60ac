"""The recurrent policy: a shared slot encoder, an LSTM, and heads sampled in sequence.

No parameter shape depends on the number of slots, so one set of weights works for hosts with 2, 3
and 10 slots. Permuting the slots permutes the slot head's output and changes nothing else.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from esper.leyline.actions import (
    ALPHA_TARGETS,
    BLUEPRINTS,
    CANONICAL_CHOICE,
    CHOICE_HEADS,
    HEAD_WIDTHS,
    HEADS,
    Op,
)
from esper.tamiyo.policy import native_network as native
from esper.tamiyo.policy.action_masks import (
    ActionMasks,
    MaskedCategorical,
    padded_columns,
    relevance,
)
from esper.tamiyo.policy.features import FeatureNames, Observation
from esper.tamiyo.policy.interface import Evaluation, Policy, RecurrentState, full_precision, upcast

OP_BIAS: dict[Op, float] = {
    Op.WAIT: 4.0,
    Op.GERMINATE: 0.0,
    Op.SET_ALPHA_TARGET: 0.0,
    Op.PRUNE: -3.0,
    Op.FOSSILISE: 4.0,
    Op.ADVANCE: 5.0,
}
"""Initial biases of the op head. Without them a new policy prunes what it grows, learns that
growing only costs, and stops growing. With ADVANCE 2 and FOSSILISE 0 an untrained policy fossilised
2.6 % of its germinated seeds in 40-step episodes, too few to learn from; with these biases 32 %."""

FULL_ALPHA_BIAS = 2.0
"""Initial bias of alpha target 1. A seed with a lower target is priced but cannot be fossilised
unless SET_ALPHA_TARGET raises it to 1. With uniform targets two seeds in three had a lower one;
growing then costs more than it gains, and the policy stops growing before it has learned which
seeds pay."""

MAX_HEAD_WIDTH = 128
"""Maximum hidden units of a head; heads as wide as a large LSTM would add half its cost."""


class Head(nn.Module):
    """Two linear layers with a ReLU between them."""

    def __init__(self, inputs: int, hidden: int, outputs: int):
        super().__init__()
        self.hidden = nn.Linear(inputs, hidden)
        self.out = nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., inputs]`` to ``[..., outputs]``."""
        return self.out(self.hidden(x).relu())


class FactoredLSTM(Policy[Observation]):
    """Actor and critic over ``Observation``.

    The op is sampled from the LSTM's output. The slot is sampled given the op, by scoring slot
    embeddings. The six choice heads are sampled given op and slot. Only the critic sees
    ``Observation.critic``.

    On a CPU in full precision the native library computes the policy on ``threads`` threads;
    results do not depend on their number. On other devices, in half precision, or if ``native`` is
    false, torch computes it.

    Args:
        lstm_hidden: width of the LSTM.
        slot_width: width of a slot embedding.
        features: the columns of its observations; all features of this version if None.
    """

    heads = HEADS

    def __init__(
        self,
        lstm_hidden: int = 128,
        slot_width: int = 32,
        features: FeatureNames | None = None,
    ):
        super().__init__()
        names = features or FeatureNames.current()
        self.features = names
        self.native, self.threads = True, 1
        self.lstm_hidden = lstm_hidden
        self.blueprint_embedding = nn.Embedding(len(BLUEPRINTS), 4)
        self.slot_encoder = nn.Sequential(
            nn.Linear(len(names.slots) + 4, slot_width),
            nn.ReLU(),
            nn.Linear(slot_width, slot_width),
            nn.ReLU(),
        )
        self.encoder = nn.Sequential(
            nn.Linear(len(names.host) + 2 * slot_width, lstm_hidden),
            nn.LayerNorm(lstm_hidden),
            nn.ReLU(),
        )
        self.lstm = nn.LSTM(lstm_hidden, lstm_hidden)
        self.op_embedding = nn.Embedding(len(Op), 16)
        width = min(lstm_hidden, MAX_HEAD_WIDTH)
        self.op_head = Head(lstm_hidden, width, len(Op))
        self.slot_head = Head(lstm_hidden + 16 + slot_width, 64, 1)
        self.choice_trunk = nn.Sequential(
            nn.Linear(lstm_hidden + 16 + slot_width, width), nn.ReLU()
        )
        self.choice_heads = nn.ModuleDict(
            {head: nn.Linear(width, HEAD_WIDTHS[head]) for head in CHOICE_HEADS}
        )
        self.value_head = Head(lstm_hidden + len(names.critic), width, 1)
        widths = [layer.out_features for layer in self._choice_layers()]
        # Padding reads the column of zeros that is one past the end.
        columns = torch.tensor(padded_columns(widths, padding=sum(widths)))
        self.register_buffer("choice_places", columns, persistent=False)
        self._initialise()
        self._for_native = self._native_sizes(), self._native_parameters()
        self._packed: native.PackedWeights | None = None

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if "embedding" in name:
                nn.init.normal_(parameter, std=0.1)
            elif name.endswith("weight") and parameter.ndim == 2:
                nn.init.orthogonal_(parameter, 2**0.5)
            elif "weight" in name and parameter.ndim == 2:
                nn.init.orthogonal_(parameter)
            elif "bias" in name:
                nn.init.zeros_(parameter)
        with torch.no_grad():
            forget_gate = slice(self.lstm_hidden, 2 * self.lstm_hidden)
            self.lstm.get_parameter("bias_ih_l0")[forget_gate] = 1.0
            for layer in (self.op_head.out, self.slot_head.out, *self._choice_layers()):
                layer.weight.mul_(0.01)
            self.value_head.out.weight.mul_(0.1)
            self.op_head.out.bias.copy_(torch.tensor([OP_BIAS[op] for op in Op]))
            full = ALPHA_TARGETS.index(1.0)
            self.choice_heads["alpha_target"].get_parameter("bias")[full] = FULL_ALPHA_BIAS

    def _choice_layers(self) -> list[nn.Linear]:
        return [layer for layer in self.choice_heads.values() if isinstance(layer, nn.Linear)]

    def initial_hidden(self, environments: int) -> RecurrentState:
        """See ``Policy.initial_hidden``."""
        zeros = self.op_embedding.weight.new_zeros(1, environments, self.lstm_hidden)
        return zeros, zeros.clone()

    def head_parameters(self, head: str) -> list[nn.Parameter]:
        """See ``Policy.head_parameters``."""
        heads = {"op": self.op_head, "slot": self.slot_head, "value": self.value_head}
        module = heads[head] if head in heads else self.choice_heads[head]
        return list(module.parameters())

    def noise_shape(self, observation: Observation) -> tuple[int, int]:
        """See ``Policy.noise_shape``."""
        return len(HEADS), max(*HEAD_WIDTHS.values(), observation.slots.shape[-2])

    # Native twin: policy/network.h, decide.
    @torch.no_grad()
    def act(
        self, observation: Observation, hidden: RecurrentState, noise: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, RecurrentState]:
        """See ``Policy.act``."""
        if self._computes_natively(observation, hidden):
            sizes, parameters = self._for_native
            inputs = observation, hidden, noise
            return native.act(sizes, parameters, *inputs, self.threads, self._packed)
        features, slots = self.encode(observation)
        memory, hidden = self.run_lstm(features[None], hidden)
        with full_precision(memory.device):
            actions, log_prob, value = self._choose(memory[0], slots, observation, noise)
        return actions, log_prob, value, hidden

    def _choose(
        self, memory: Tensor, slots: Tensor, observation: Observation, noise: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Choose op, then slot, then the other heads; returns actions, log-prob and value."""

        def choose(distribution: MaskedCategorical, heads: slice) -> Tensor:
            if noise is None:
                return distribution.mode
            shape = distribution.log_probs.shape
            return distribution.sample(noise[:, heads, : shape[-1]].reshape(shape))

        masks = observation.masks
        ops = MaskedCategorical(self.op_head(memory), masks.ops, validate=False)
        op = choose(ops, slice(0, 1))
        slot_distribution = MaskedCategorical(
            self._slot_logits(memory, slots, op), masks.slots_of(op), validate=False
        )
        slot = choose(slot_distribution, slice(1, 2))
        slot = torch.where(op == Op.WAIT, CANONICAL_CHOICE["slot"], slot)
        choices = MaskedCategorical(
            *self._choices(memory, slots, op, slot, observation), validate=False
        )
        choice_actions = choose(choices, slice(2, None))
        both = torch.stack([ops.log_prob(op), slot_distribution.log_prob(slot)], -1)
        log_probs = torch.cat([both, choices.log_prob(choice_actions)], -1)
        log_prob = torch.where(relevance(op), log_probs, 0.0).sum(-1)
        actions = torch.cat([torch.stack([op, slot], -1), choice_actions], -1)
        return actions, log_prob, self._value(memory, observation)

    @contextmanager
    def frozen_weights(self) -> Iterator[None]:
        """See ``Policy.frozen_weights``."""
        self._packed = native.PackedWeights()
        try:
            yield
        finally:
            self._packed = None

    def op_probability_function(self) -> Callable[[RecurrentState, ActionMasks], Tensor]:
        """A function that computes the probability of each op, ``[N, ops]``, in a step.

        Its arguments are the recurrent state after the step, which contains the output of the LSTM,
        and the masks. It has a copy of the current weights, which later updates do not change.
        """
        return partial(_op_probabilities, copy.deepcopy(self.op_head))

    def evaluate_actions(
        self, observation: Observation, actions: Tensor, hidden: RecurrentState
    ) -> Evaluation:
        """See ``Policy.evaluate_actions``."""
        if self._computes_natively(observation, hidden):
            sizes, parameters = self._for_native
            return Evaluation(
                *native.evaluate(sizes, parameters, observation, actions, hidden, self.threads)
            )
        return super().evaluate_actions(observation, actions, hidden)

    def _computes_natively(self, observation: Observation, hidden: RecurrentState) -> bool:
        weight = self.op_embedding.weight
        inputs = (observation.host, observation.slots, observation.critic, *hidden)
        return (
            self.native
            # A subclass may override the computation.
            and type(self) is FactoredLSTM
            and weight.device.type == "cpu"
            and self.amp_dtype is None
            and not any(x.requires_grad or x.dtype != weight.dtype for x in inputs)
            and native.available(weight.dtype)
        )

    def _native_sizes(self) -> native.Sizes:
        kinds, ops = self.blueprint_embedding, self.op_embedding
        assert self.features is not None
        sizes: dict[str, Any] = dict(
            host_features=len(self.features.host),
            slot_features=len(self.features.slots),
            critic_features=len(self.features.critic),
            blueprints=kinds.num_embeddings,
            kind_width=kinds.embedding_dim,
            slot_width=self.slot_head.hidden.in_features - self.lstm_hidden - ops.embedding_dim,
            hidden=self.lstm_hidden,
            ops=ops.num_embeddings,
            op_width=ops.embedding_dim,
            op_hidden=self.op_head.hidden.out_features,
            slot_hidden=self.slot_head.hidden.out_features,
            trunk=self.op_head.hidden.out_features,
            value_hidden=self.value_head.hidden.out_features,
            widths=tuple(layer.out_features for layer in self._choice_layers()),
        )
        return tuple(sizes.items())

    def _native_parameters(self) -> list[Tensor]:
        """All parameters, in the order of ``native/src/policy/calls.h``."""
        modules: list[nn.Module] = [
            self.blueprint_embedding,
            self.slot_encoder,
            self.encoder,
            self.lstm,
            self.op_embedding,
            self.op_head,
            self.slot_head,
            self.choice_trunk,
            self.value_head,
            self.choice_heads,
        ]
        return [parameter for module in modules for parameter in module.parameters()]

    # Native twin: policy/network.h, encode.
    def encode(self, observation: Observation) -> tuple[Tensor, Tensor]:
        """Input of the LSTM ``[..., lstm_hidden]`` and slot embeddings ``[..., S, slot_width]``."""
        with self.trunk_precision(observation.host.device):
            kinds = self.blueprint_embedding(observation.blueprints)
            slots = self.slot_encoder(torch.cat([observation.slots, kinds], -1))
            # Embeddings are non-negative, so the 0 of a missing slot never exceeds the maximum.
            exists = observation.masks.exists[..., None]
            present = torch.where(exists, slots, 0.0)
            mean = present.sum(-2) / exists.sum(-2)
            summary = torch.cat([mean, present.amax(-2)], -1)
            features = self.encoder(torch.cat([observation.host, summary], -1))
        return features, upcast(slots)

    # Native twin: policy/sequence.h, Lstm.
    def run_lstm(self, features: Tensor, hidden: RecurrentState) -> tuple[Tensor, RecurrentState]:
        """See ``Policy.run_lstm``."""
        with self.trunk_precision(features.device):
            memory, (h, c) = self.lstm(features, hidden)
        return upcast(memory), (upcast(h), upcast(c))

    # Native twin: policy/network.h, decide.
    def evaluate_heads(
        self,
        memory: Tensor,
        encoding: tuple[Tensor, ...],
        observation: Observation,
        actions: Tensor,
    ) -> Evaluation:
        """See ``Policy.evaluate_heads``. All heads share one padded log-softmax."""
        with full_precision(memory.device):
            return self._evaluation(memory, encoding[1], observation, actions)

    def _evaluation(
        self, memory: Tensor, slots: Tensor, observation: Observation, actions: Tensor
    ) -> Evaluation:
        op, slot = actions[..., 0], actions[..., 1]
        masks = observation.masks
        parts: list[tuple[Tensor, Tensor]] = [
            (self.op_head(memory)[..., None, :], masks.ops[..., None, :]),
            (self._slot_logits(memory, slots, op)[..., None, :], masks.slots_of(op)[..., None, :]),
            self._choices(memory, slots, op, slot, observation),
        ]
        widest = max(logits.shape[-1] for logits, _ in parts)
        logits = torch.cat([_pad_columns(part, widest) for part, _ in parts], -2)
        legal = torch.cat([_pad_columns(mask, widest) for _, mask in parts], -2)
        distribution = MaskedCategorical(logits, legal, validate=False)
        matters = relevance(op)
        log_probs = torch.where(matters, distribution.log_prob(actions), 0.0)
        entropy = torch.where(matters, distribution.entropy(), 0.0)
        choice = matters & (legal.sum(-1) > 1)
        return Evaluation(log_probs.sum(-1), entropy, choice, self._value(memory, observation))

    # Native twin: policy/network.h, decide_slot.
    def _slot_logits(self, memory: Tensor, slots: Tensor, op: Tensor) -> Tensor:
        """Logit of each slot given memory and op, ``[..., S]``."""
        context = torch.cat([memory, self.op_embedding(op)], -1)
        context = context[..., None, :].expand(*slots.shape[:-1], -1)
        return self.slot_head(torch.cat([context, slots], -1))[..., 0]

    # Native twin: policy/network.h, decide_choices.
    def _choices(
        self, memory: Tensor, slots: Tensor, op: Tensor, slot: Tensor, observation: Observation
    ) -> tuple[Tensor, Tensor]:
        """Logits and legal options of the choice heads, given op and slot.

        Both are ``[..., choice heads, widest]``. The six linear maps are computed as one.
        """
        index = slot[..., None, None].expand(*slot.shape, 1, slots.shape[-1])
        embedding = slots.gather(-2, index).squeeze(-2)
        trunk = self.choice_trunk(torch.cat([memory, self.op_embedding(op), embedding], -1))
        options = observation.masks.choices_of(op, slot)
        weight, bias = (
            torch.cat([getattr(layer, name) for layer in self._choice_layers()])
            for name in ("weight", "bias")
        )
        logits = nn.functional.linear(trunk, weight, bias)
        columns = self.get_buffer("choice_places")
        return _pad_columns(logits, logits.shape[-1] + 1)[..., columns], options

    # Native twin: policy/network.h, estimate_value.
    def _value(self, memory: Tensor, observation: Observation) -> Tensor:
        value = self.value_head(torch.cat([memory, observation.critic], -1))[..., 0]
        return value if value.dtype == torch.float64 else value.float()


@torch.no_grad()
def _op_probabilities(op_head: Head, hidden: RecurrentState, masks: ActionMasks) -> Tensor:
    with full_precision(hidden[0].device):
        logits = op_head(hidden[0][-1])
        return MaskedCategorical(logits, masks.ops, validate=False).log_probs.exp()


def _pad_columns(x: Tensor, width: int) -> Tensor:
    """``x`` with its last axis padded to ``width`` with zeros (false)."""
    if x.shape[-1] == width:
        return x
    return nn.functional.pad(x, (0, width - x.shape[-1]))
