"""The epoch of a training that is best on validation after the price, to which one can return.

The best of many epochs is better by chance too: on test it is as often worse than the last. So one
returns to it only where the difference is more than the noise of the validation samples.
"""

from typing import Any

from torch import nn

from esper.kasmina.wider_layers import parameter_count
from esper.leyline.stages import Stage
from esper.own_models.attachment import copied_state
from esper.own_models.growth_result import EpochRecord, comparable, price_of
from esper.own_models.objectives import Validation

DECISION_STAGES = (Stage.DORMANT, Stage.FOSSILISED)
"""Stages of slots about which all is decided."""


class BestEpoch:
    """Holds the module as it was after its best epoch.

    Epochs in which a seed is tried do not count: what is handed back holds decided seeds alone.

    Args:
        model: the module before it grows.
        price: see ``grow``.

    Attributes:
        epoch: its number; 0 before the first.
        worth: ``Validation.net`` after it minus the price of the parameters added.
        copies: see ``GrowthResult.copies``.
    """

    def __init__(self, model: nn.Module, price: float):
        self.epoch, self.worth, self.copies = 0, float("-inf"), list[tuple[str, int]]()
        self._price, self._host, self._initial = price, parameter_count(model), copied_state(model)
        self._state: dict[str, Any] = {}

    def net_worth(self, validation: Validation, parameters: int) -> float:
        """What a validation is worth for a module of so many parameters."""
        return comparable(validation.net - price_of(self._price, parameters / self._host))

    def offer(self, record: EpochRecord, model: nn.Module, copies: list[tuple[str, int]]) -> None:
        """Hold the module as it is after an epoch if it is better than before."""
        worth = self.net_worth(record.validation, record.parameters)
        if worth > self.worth and all(stage in DECISION_STAGES for stage in record.stages.values()):
            self.epoch, self.worth, self.copies = record.epoch, worth, list(copies)
            self._state = copied_state(model)

    def exchange(self, model: nn.Module, copies: list[tuple[str, int]]) -> list[tuple[str, int]]:
        """Give the module the layers and weights of that epoch, and hold those that it had.

        Args:
            model: the module, whatever has become of it.
            copies: its copied blocks.

        Returns:
            those of that epoch.
        """
        from esper.own_models import loading  # only who goes back needs it

        state = copied_state(model)
        loading.reset(model, self._initial)
        loading.load_grown(model, self._state)
        self._state, self.copies, copies = state, copies, self.copies
        return copies

    def state_dict(self) -> dict[str, Any]:
        """What a later process needs; the module before it grew is not part of it."""
        return {name: getattr(self, name) for name in ("epoch", "worth", "copies", "_state")}

    def load_state_dict(self, content: dict[str, Any]) -> None:
        """The inverse of ``state_dict``."""
        for name, value in content.items():
            setattr(self, name, value)
