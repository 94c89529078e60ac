"""The recurrent policy: a shared slot encoder, an LSTM, and heads sampled in sequence.

No parameter shape depends on the number of slots, so one set of weights works for hosts with 2, 3
and 10 slots. Permuting the slots permutes the slot head's output and changes nothing else.
"""

import copy
from collections.abc import Callable
from functools import partial

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
from esper.tamiyo.policy.action_masks import ActionMasks, MaskedCategorical, gumbel, relevance
from esper.tamiyo.policy.features import FeatureNames, Observation
from esper.tamiyo.policy.interface import Evaluation, Policy, RecurrentState, full_precision, upcast
from esper.tamiyo.policy.layers import Head, ParallelHeads, StepwiseLSTM

OP_BIAS: dict[Op, float] = {
    Op.WAIT: 4.0,
    Op.GERMINATE: 2.0,
    Op.SET_ALPHA_TARGET: 0.0,
    Op.PRUNE: -3.0,
    Op.FOSSILISE: 4.0,
    Op.ADVANCE: 5.0,
}
"""Initial biases of the op head. Without them a new policy prunes what it grows, learns that
growing only costs, and stops growing. With ADVANCE 2 and FOSSILISE 0 an untrained policy fossilised
2.6 % of its germinated seeds in 40-step episodes, too few to learn from; with these biases 32 %.
With GERMINATE 0 one run in eight learned to wait for ever before it had seen a seed pay
(``benchmarks/growth_defaults.py``)."""

FULL_ALPHA_BIAS = 2.0
"""Initial bias of alpha target 1. A seed with a lower target is priced but cannot be fossilised
unless SET_ALPHA_TARGET raises it to 1. With uniform targets two seeds in three had a lower one;
growing then costs more than it gains, and the policy stops growing before it has learned which
seeds pay."""

MAX_HEAD_WIDTH = 128
"""Maximum hidden units of a head; heads as wide as a large LSTM would add half its cost."""

SLOT_WIDTH = 32
"""Width of the embedding of a slot."""


class FactoredLSTM(Policy[Observation]):
    """Actor and critic over ``Observation``.

    The op is sampled from the LSTM's output. The slot is sampled given the op, by scoring slot
    embeddings. The six choice heads are sampled given op and slot. Only the critic sees
    ``Observation.critic``.

    Args:
        lstm_hidden: width of the LSTM.
        features: the columns of its observations; all features of this version if None.
    """

    heads = HEADS

    def __init__(self, lstm_hidden: int = 128, features: FeatureNames | None = None):
        super().__init__()
        names = features or FeatureNames.current()
        self.features = names
        self.lstm_hidden = lstm_hidden
        self.blueprint_embedding = nn.Embedding(len(BLUEPRINTS), 4)
        self.slot_encoder = nn.Sequential(
            nn.Linear(len(names.slots) + 4, SLOT_WIDTH),
            nn.ReLU(),
            nn.Linear(SLOT_WIDTH, SLOT_WIDTH),
            nn.ReLU(),
        )
        self.encoder = nn.Sequential(
            nn.Linear(len(names.host) + 2 * SLOT_WIDTH, lstm_hidden),
            nn.LayerNorm(lstm_hidden),
            nn.ReLU(),
        )
        self.lstm = StepwiseLSTM(lstm_hidden, lstm_hidden)
        self.op_embedding = nn.Embedding(len(Op), 16)
        width = min(lstm_hidden, MAX_HEAD_WIDTH)
        self.op_head = Head(lstm_hidden, width, len(Op))
        self.slot_head = Head(lstm_hidden + 16 + SLOT_WIDTH, 64, 1)
        self.choice_trunk = nn.Sequential(
            nn.Linear(lstm_hidden + 16 + SLOT_WIDTH, width), nn.ReLU()
        )
        self.choice_heads = ParallelHeads(width, {head: HEAD_WIDTHS[head] for head in CHOICE_HEADS})
        self.value_head = Head(lstm_hidden + len(names.critic), width, 1)
        self._initialise()

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
            for layer in (self.op_head.out, self.slot_head.out, *self.choice_heads.linears()):
                layer.weight.mul_(0.01)
            self.value_head.out.weight.mul_(0.1)
            self.op_head.out.bias.copy_(torch.tensor([OP_BIAS[op] for op in Op]))
            full = ALPHA_TARGETS.index(1.0)
            self.choice_heads["alpha_target"].get_parameter("bias")[full] = FULL_ALPHA_BIAS

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

    @torch.no_grad()
    def act(
        self, observation: Observation, hidden: RecurrentState, noise: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, RecurrentState]:
        """See ``Policy.act``."""
        features, slots = self.encode(observation)
        memory, hidden = self.run_lstm(features[None], hidden)
        with full_precision(memory.device):
            actions, log_prob, value = self._choose(memory[0], slots, observation, noise)
        return actions, log_prob, value, hidden

    def _choose(
        self, memory: Tensor, slots: Tensor, observation: Observation, noise: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Choose op, then slot, then the other heads; returns actions, log-prob and value."""
        masks, scores = observation.masks, None if noise is None else gumbel(noise)

        def choose(logits: Tensor, legal: Tensor, heads: slice | int) -> Tensor:
            if scores is not None:
                logits = logits + scores[:, heads, : logits.shape[-1]]
            return logits.masked_fill(~legal, -torch.inf).argmax(-1)

        ops = self.op_head(memory), masks.ops
        op = choose(*ops, 0)
        context = self._context(memory, op)
        slot_options = self._slot_logits(context, slots), masks.slots_of(op)
        slot = torch.where(op == Op.WAIT, CANONICAL_CHOICE["slot"], choose(*slot_options, 1))
        choices = self._choice_logits(context, slots, slot), masks.choices_of(op, slot)
        actions = torch.cat([torch.stack([op, slot], -1), choose(*choices, slice(2, None))], -1)
        distribution = _joint_distribution(ops, slot_options, choices)
        log_prob = torch.where(relevance(op), distribution.log_prob(actions), 0.0).sum(-1)
        return actions, log_prob, self._value(memory, observation)

    def op_probability_function(self) -> Callable[[RecurrentState, ActionMasks], Tensor]:
        """A function that computes the probability of each op, ``[N, ops]``, in a step.

        Its arguments are the recurrent state after the step, which contains the output of the LSTM,
        and the masks. It has a copy of the current weights, which later updates do not change.
        """
        return partial(_op_probabilities, copy.deepcopy(self.op_head))

    def encode(self, observation: Observation) -> tuple[Tensor, Tensor]:
        """Input of the LSTM ``[..., lstm_hidden]`` and slot embeddings ``[..., S, SLOT_WIDTH]``."""
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

    def run_lstm(self, features: Tensor, hidden: RecurrentState) -> tuple[Tensor, RecurrentState]:
        """See ``Policy.run_lstm``."""
        with self.trunk_precision(features.device):
            memory, (h, c) = self.lstm.run(features, hidden)
        return upcast(memory), (upcast(h), upcast(c))

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
        masks, context = observation.masks, self._context(memory, op)
        distribution = _joint_distribution(
            (self.op_head(memory), masks.ops),
            (self._slot_logits(context, slots), masks.slots_of(op)),
            (self._choice_logits(context, slots, slot), masks.choices_of(op, slot)),
        )
        matters = relevance(op)
        log_probs = torch.where(matters, distribution.log_prob(actions), 0.0)
        entropy = torch.where(matters, distribution.entropy(), 0.0)
        choice = matters & ((~distribution.illegal).sum(-1) > 1)
        return Evaluation(log_probs.sum(-1), entropy, choice, self._value(memory, observation))

    def _context(self, memory: Tensor, op: Tensor) -> Tensor:
        """Memory and embedded op, the input of slot head and choice heads."""
        return torch.cat([memory, self.op_embedding(op)], -1)

    def _slot_logits(self, context: Tensor, slots: Tensor) -> Tensor:
        """Logit of each slot, ``[..., S]``."""
        context = context[..., None, :].expand(*slots.shape[:-1], -1)
        return self.slot_head(torch.cat([context, slots], -1))[..., 0]

    def _choice_logits(self, context: Tensor, slots: Tensor, slot: Tensor) -> Tensor:
        """Logits of the choice heads given the slot, ``[..., choice heads, widest]``."""
        index = slot[..., None, None].expand(*slot.shape, 1, slots.shape[-1])
        embedding = slots.gather(-2, index).squeeze(-2)
        return self.choice_heads(self.choice_trunk(torch.cat([context, embedding], -1)))

    def _value(self, memory: Tensor, observation: Observation) -> Tensor:
        value = self.value_head(torch.cat([memory, observation.critic], -1))[..., 0]
        return value if value.dtype == torch.float64 else value.float()


@torch.no_grad()
def _op_probabilities(op_head: Head, hidden: RecurrentState, masks: ActionMasks) -> Tensor:
    with full_precision(hidden[0].device):
        logits = op_head(hidden[0][-1])
        return MaskedCategorical(logits, masks.ops, validate=False).log_probs.exp()


def _joint_distribution(
    op: tuple[Tensor, Tensor], slot: tuple[Tensor, Tensor], choices: tuple[Tensor, Tensor]
) -> MaskedCategorical:
    """The distributions of all heads, padded, ``[..., heads, widest]``.

    Args:
        op, slot: logits and mask of one head, ``[..., options]``.
        choices: those of the choice heads, ``[..., choice heads, options]``.
    """
    widest = max(slot[0].shape[-1], op[0].shape[-1], choices[0].shape[-1])

    def joint(part: int) -> Tensor:
        heads = op[part][..., None, :], slot[part][..., None, :], choices[part]
        return torch.cat([_pad_columns(head, widest) for head in heads], -2)

    return MaskedCategorical(joint(0), joint(1), validate=False)


def _pad_columns(x: Tensor, width: int) -> Tensor:
    """``x`` with its last axis padded to ``width`` with zeros (false)."""
    if x.shape[-1] == width:
        return x
    return nn.functional.pad(x, (0, width - x.shape[-1]))
