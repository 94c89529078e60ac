"""Copied channels that turn into random ones while the module trains.

Behind a norm of all channels new ones have to begin as copies, and what learns from there stays
alike (``benchmarks/widening.py``, *Behind norms*). So their weights, and those that read them, are
moved to random ones meanwhile, no faster than the optimizer could: faster, a network that has
learned much loses it.
"""

from collections.abc import Mapping
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


Moves = Mapping[str, tuple[Tensor, float]]
"""By the name of a parameter how far each entry has to go, and the longest step."""


def moves_to(model: nn.Module, goal: nn.Module) -> Moves:
    """The moves to the parameters of a module that has other values of some."""
    pairs = zip(model.named_parameters(), goal.parameters(), strict=True)
    moves = {name: (q - p).detach() for (name, p), q in pairs if not torch.equal(p, q)}
    return {name: (move, float(move.abs().max()) / STEPS) for name, move in moves.items()}


class Blend:
    """Moves the entries of parameters after each step of their optimizer, whichever it is.

    An entry moves at most by ``PACE`` learning rates a step; Adam moves it by about one.

    Args:
        model: the module.
        moves: of its parameters, see ``moves_to`` and ``state_dict``.
    """

    def __init__(self, model: nn.Module, moves: Moves):
        # The hook, which is torch's, must not keep the module.
        self._moves: Any = WeakIdKeyDictionary()
        self.load_state_dict(moves, model)
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

    def state_dict(self, model: nn.Module) -> Moves:
        """What is left to do; it shares no memory with this."""
        moves = ((name, self._moves.get(p)) for name, p in model.named_parameters())
        return {name: (move[0].clone(), move[1]) for name, move in moves if move is not None}

    def load_state_dict(self, state: Moves, model: nn.Module) -> None:
        """The inverse of ``state_dict``."""
        self._moves.clear()
        for name, (move, longest) in state.items():
            p = model.get_parameter(name)
            self._moves[p] = move.to(p, copy=True), longest

    def undo(self) -> None:
        """Take no further steps."""
        self._moves.clear()
        self._hook.remove()
