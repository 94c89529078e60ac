"""Modules as users write them, grown and searched for slots."""

from typing import Any

import torch
from torch import Tensor, nn

import esper
from esper.kasmina.slots import SlotSpec
from esper.own_models.slot_search import find_slots


def quietly_grown(model: nn.Module, train: Any, held_back: Any, **more: Any) -> esper.GrowthResult:
    """``esper.grow`` by the rule for 16 epochs, unless ``more`` says otherwise."""
    arguments: dict[str, Any] = {"policy": "rule", "epochs": 16, "progress": False}
    return esper.grow(model, train, held_back, **(arguments | more))


def germinated(result: esper.GrowthResult) -> bool:
    """Whether a seed was planted in any epoch."""
    return any("germinates" in text for record in result.history for text in record.actions)


def slots_of(
    model: nn.Module, x: Tensor, names: list[str] | str | None = None
) -> tuple[SlotSpec, ...]:
    """The slots that are found in the module, which is put in evaluation mode."""
    model.eval()
    with torch.no_grad():
        return find_slots(model, lambda half: model(x[: len(x) // 2] if half else x), names)
