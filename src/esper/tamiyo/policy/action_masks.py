"""Masks of the legal options, and categorical distributions over them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from esper.kasmina.transfer import cached_tensor
from esper.leyline.actions import (
    CANONICAL_CHOICE,
    CHOICE_HEADS,
    HEAD_WIDTHS,
    HEADS,
    RELEVANT_HEADS,
    Op,
)

MASKED_LOGIT = torch.finfo(torch.float32).min
"""Logit of an illegal option; finite, so that arithmetic on it never gives NaN."""


@dataclass(frozen=True, slots=True)
class ActionMasks:
    """Legal actions of each environment; leading axes ``[...]`` are ``[N]`` or ``[T, N]``.

    Attributes:
        slots: bool ``[..., ops, S]``, the slots in which each op is legal.
        kinds: bool ``[..., S, blueprints]``, the blueprints each slot accepts; all false for slots
            that pad a host to the slot count of another host.
    """

    slots: Tensor
    kinds: Tensor

    @property
    def ops(self) -> Tensor:
        """Bool ``[..., ops]``: ops that are legal in at least one slot."""
        return self.slots.any(-1)

    @property
    def exists(self) -> Tensor:
        """Bool ``[..., S]``: the slots that the host has."""
        return self.kinds.any(-1)

    def slots_of(self, op: Tensor) -> Tensor:
        """Slots in which ``op [...]`` is legal, bool ``[..., S]``."""
        index = op[..., None, None].expand(*op.shape, 1, self.slots.shape[-1])
        return self.slots.gather(-2, index).squeeze(-2)

    def choices_of(self, op: Tensor, slot: Tensor) -> Tensor:
        """Legal options of the choice heads, bool ``[..., choice heads, widest]``.

        A head that is irrelevant for ``op`` has only its canonical option, so its log-prob and
        entropy are zero.
        """
        index = slot[..., None, None].expand(*slot.shape, 1, self.kinds.shape[-1])
        kinds = self.kinds.gather(-2, index)
        free, canonical = _choice_tables(op.device)
        options = torch.cat([kinds, free[1:].expand(*op.shape, -1, -1)], -2)
        relevant = relevance(op)[..., 2:, None]
        return torch.where(relevant, options, canonical)


def relevance(op: Tensor) -> Tensor:
    """Heads that are relevant for ``op [...]``: bool ``[..., heads]`` in the order of ``HEADS``."""
    table = tuple(tuple(head in RELEVANT_HEADS[o] for head in HEADS) for o in Op)
    return cached_tensor(table, op.device)[op]


def _choice_tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """For the choice heads: a mask of the existing options, and one of the canonical option."""
    widest = range(max(HEAD_WIDTHS[head] for head in CHOICE_HEADS))
    free = tuple(tuple(i < HEAD_WIDTHS[head] for i in widest) for head in CHOICE_HEADS)
    canonical = tuple(tuple(i == CANONICAL_CHOICE[head] for i in widest) for head in CHOICE_HEADS)
    return cached_tensor(free, device), cached_tensor(canonical, device)


def gumbel(uniform: Tensor) -> Tensor:
    """Gumbel noise of uniform numbers in (0, 1): the option of the largest sum of log-probability
    and noise is a draw."""
    return -torch.log(-torch.log(uniform))


class MaskedCategorical:
    """Categorical distributions over the legal options of the last axis.

    Logits in half precision are converted to float32: half precision cannot distinguish close
    logits, and gradients through its log-softmax overflow. Masking sets the logits of illegal
    options to the lowest finite number, which gives them a probability of exactly 0.

    Args:
        logits: ``[..., K]``, any floating dtype.
        mask: bool ``[..., K]``, true for legal options.
        validate: whether to check that every row has a legal option.

    Raises:
        ValueError: a row of ``mask`` has no legal option.
    """

    def __init__(self, logits: Tensor, mask: Tensor, validate: bool = True):
        if validate and not bool(mask.any(-1).all()):
            raise ValueError("MaskedCategorical: a row of the mask has no legal option")
        exact = logits if logits.dtype == torch.float64 else logits.float()
        self.illegal = ~mask
        self.log_probs = exact.masked_fill(self.illegal, MASKED_LOGIT).log_softmax(-1)

    def sample(self, uniform: Tensor) -> Tensor:
        """Draw one option per row with the Gumbel-max trick, int64 ``[...]``.

        Args:
            uniform: uniform numbers in (0, 1), ``[..., K]``.
        """
        scores = self.log_probs + gumbel(uniform)
        return scores.masked_fill(self.illegal, -torch.inf).argmax(-1)

    @property
    def mode(self) -> Tensor:
        """The most probable option, int64 ``[...]``."""
        return self.log_probs.argmax(-1)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-probability of ``value [...]``."""
        return self.log_probs.gather(-1, value[..., None]).squeeze(-1)

    def entropy(self) -> Tensor:
        """Entropy in nats, ``[...]``; illegal options contribute 0."""
        probabilities = self.log_probs.exp()
        return -(probabilities * self.log_probs.masked_fill(self.illegal, 0.0)).sum(-1)
