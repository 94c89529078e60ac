"""Modules as users write them, grown and searched for slots."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import esper
from esper.kasmina.slots import SlotSpec
from esper.own_models.slot_search import find_slots
from own_modules import loader
from wide_modules import multilayer


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


EPOCHS = 4


def products(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Six inputs and two classes, of which one unit knows little."""
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] * x[:, 1] > 0).long()


def logged_growth(folder: Path, **more: Any) -> esper.GrowthResult:
    """A small growth by the policy ``widen`` beside its twin, written into a run directory."""
    torch.manual_seed(0)
    batches = loader(*products(128, 0)), loader(*products(64, 1))
    arguments = {"epochs": EPOCHS, "progress": False, "twin": True, "price": 0.0} | more
    arguments |= {"test_loader": loader(*products(64, 2)), "run_directory": folder}
    return esper.grow(multilayer(), *batches, **arguments)
