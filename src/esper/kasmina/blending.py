"""Copied channels that turn into random ones while the module trains.

Behind a norm of all channels new ones have to begin as copies, and what learns from there stays
alike (``benchmarks/widening.py``, *Behind norms*). So their weights, and those that read them, are
moved to random ones meanwhile, no faster than the optimizer could: faster, a network that has
learned much loses it.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

PACE, STEPS = 2.0, 20
"""By how many learning rates an entry moves in a step, and in how many steps at least all of the
way. Of a GPT that was trained for 40 epochs, three more give 23 % if nothing moves, 22 at this
pace and 13 in 20 steps, twelve more 27, 29 and 27."""


class Blend:
    """Moves the entries of parameters after each step of their optimizer, whichever it is.

    An entry moves at most by ``PACE`` learning rates a step; Adam moves it by about one.

    Args:
        model: the module.
        goal: the same with other values of its parameters.
    """

    def __init__(self, model: nn.Module, goal: nn.Module):
        # The hook, which is torch's, must not keep the module. What is left, and the longest step:
        self._moves: Any = WeakIdKeyDictionary()
        for p, q in zip(model.parameters(), goal.parameters(), strict=True):
            if not torch.equal(p, q):
                move = q.detach() - p.detach()
                self._moves[p] = move, float(move.abs().max()) / STEPS
        self._hook = register_optimizer_step_post_hook(self._step)

    @torch.no_grad()
    def _step(self, optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups if self._moves else ():
            rate = group.get("lr")
            for p in (p for p in group["params"] if p in self._moves):
                self._move(p, float("inf") if rate is None else PACE * float(rate))

    def _move(self, p: Tensor, most: float) -> None:
        move, longest = self._moves[p]
        limit = min(most, longest)
        step = move.clamp(-limit, limit)
        p.add_(step)
        move -= step
        if not move.any():
            del self._moves[p]

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """By the name of a parameter what is left to do; it shares no memory with this."""
        moves = ((name, self._moves.get(p)) for name, p in model.named_parameters())
        return {name: (move[0].clone(), move[1]) for name, move in moves if move is not None}

    def load_state_dict(self, state: dict[str, Any], model: nn.Module) -> None:
        """The inverse of ``state_dict``."""
        self._moves.clear()
        for name, (move, longest) in state.items():
            p = model.get_parameter(name)
            self._moves[p] = move.to(p, copy=True), longest

    def undo(self) -> None:
        """Take no further steps."""
        self._moves.clear()
        self._hook.remove()
