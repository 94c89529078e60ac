"""Counter-based random numbers: every draw is a pure function of its purpose and position.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). The key is
(run seed, stream), the counter (block, step, episode, purpose). Draws for one environment
therefore never affect another's, resuming needs no state, and all devices draw the same bits.
"""

from enum import IntEnum

import torch
from torch import Tensor

MASK_32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

_MAX_WORDS = 1 << 16
"""Words that ``StepBits`` draws at a time, few enough to stay in the cache."""


class Purpose(IntEnum):
    """Purpose of a draw. Different purposes never share random numbers."""

    HOST_INIT = 1
    MINIBATCH = 2
    ACTION = 3
    POLICY_SHUFFLE = 4
    RANDOM_POLICY = 5
    DRIFT = 6
    TASK = 7
    GYM_RESET = 8
    NEWBORN = 9
    HELD_OUT = 10
    CUT_OFF = 11
    SEED_INIT = 1000  # plus the slot index


def philox(
    counter: tuple[Tensor, ...], key: tuple[int | Tensor, int | Tensor]
) -> tuple[Tensor, ...]:
    """Ten rounds of Philox4x32 on int64 tensors of 32-bit words.

    Args:
        counter: four tensors of one shape with values in [0, 2^32).
        key: two numbers or broadcastable tensors with values in [0, 2^32).

    Returns:
        Four tensors of random 32-bit words in int64.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        # The 64-bit products overflow into the sign bit, so mask after the arithmetic shift.
        high0, high1 = ((product >> 32).bitwise_and_(MASK_32) for product in (product0, product1))
        c0, c2 = high1.bitwise_xor_(c1).bitwise_xor_(k0), high0.bitwise_xor_(c3).bitwise_xor_(k1)
        c1, c3 = product1.bitwise_and_(MASK_32), product0.bitwise_and_(MASK_32)
        k0, k1 = (k0 + _WEYL[0]) & MASK_32, (k1 + _WEYL[1]) & MASK_32
    return c0, c1, c2, c3


def random_bits(
    seed: int, streams: Tensor, purpose: int, episode: int, step: int, count: int
) -> Tensor:
    """``count`` random 32-bit words per stream, int64 ``[len(streams), count]``."""
    return bits_of_steps(seed, streams, purpose, episode, range(step, step + 1), count)[0]


def bits_of_steps(
    seed: int, streams: Tensor, purpose: int, episode: int, steps: range, count: int
) -> Tensor:
    """``random_bits`` for several steps, int64 ``[len(steps), len(streams), count]``."""
    streams = streams.long()
    blocks = torch.arange((count + 3) // 4, device=streams.device)
    shape = len(steps), len(streams), len(blocks)
    # Expand before the first round, so that every element is computed in the same way.
    c0 = blocks.expand(shape).contiguous()
    c1 = torch.arange(steps.start, steps.stop, device=streams.device)[:, None, None].expand(shape)
    counter = (c0, c1, torch.full_like(c0, episode), torch.full_like(c0, purpose))
    stream = (streams & MASK_32)[:, None].expand(shape[1:]).contiguous()
    return torch.stack(philox(counter, (seed & MASK_32, stream)), -1).flatten(2)[..., :count]


def uniform(
    seed: int,
    streams: Tensor,
    purpose: int,
    episode: int,
    step: int,
    count: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Uniform numbers in the open interval (0, 1), ``[len(streams), count]``.

    They are odd multiples of 2^-24, hence exact in float32 and never 0 or 1.
    """
    return to_uniform(random_bits(seed, streams, purpose, episode, step, count), dtype)


def to_uniform(bits: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Convert random words to numbers in (0, 1), see ``uniform``."""
    return ((bits >> 9).to(dtype) + 0.5) * 2.0**-23


def to_integers(bits: Tensor, high: int | Tensor) -> Tensor:
    """Convert random words to integers in [0, high), by multiply and shift.

    ``high``, a number or a broadcastable int64 tensor, is at most 2^31, where the product fits into
    64 bits; it is not checked.
    """
    return (bits * high) >> 32


class StepBits:
    """The random words of the steps of an episode, drawn for many steps at a time.

    A draw takes about a hundred tensor operations, whether for one step or for fifty.

    Args:
        seed, streams, purpose, episode, count: as for ``random_bits``.
        steps: number of steps that are likely to be drawn.
    """

    def __init__(
        self,
        seed: int,
        streams: Tensor,
        purpose: int,
        episode: int,
        count: int,
        steps: int = _MAX_WORDS,
    ):
        self.key = seed, streams, purpose, episode
        self.count = count
        self.block = max(1, min(steps, _MAX_WORDS // max(1, len(streams) * count)))
        self.begin, self.bits = 0, streams.new_empty(0, len(streams), count)

    def at(self, step: int) -> Tensor:
        """The words of ``step``, int64 ``[len(streams), count]``."""
        if not self.begin <= step < self.begin + len(self.bits):
            self.begin = step - step % self.block
            steps = range(self.begin, self.begin + self.block)
            self.bits = bits_of_steps(*self.key, steps, self.count)
        return self.bits[step - self.begin]
