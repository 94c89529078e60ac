"""What a module still knows of the data that it learned before."""

from typing import Any

import torch
from torch import nn

import esper
from own_modules import ResidualNet, images, loader

CPU = torch.device("cpu")


def accuracy(model: nn.Module, batches: Any) -> float | None:
    """Measured by hand."""
    model.eval()
    with torch.no_grad():
        right = [(model(x).argmax(1) == y).float() for x, y in batches]
    return float(torch.cat(right).mean())


def test_the_old_data_are_measured_before_while_and_after_a_frozen_module_grows(capsys) -> None:
    torch.manual_seed(0)
    model = ResidualNet()
    old, new = loader(*images(64, 1)), loader(*images(64, 2), shuffle=True)
    esper.grow(model, old, old, epochs=3, policy="never", progress=False)
    known = accuracy(model, old)
    model.requires_grad_(False)
    seen: list[float | None] = []
    result = esper.grow(
        model, new, loader(*images(32, 3)), epochs=12, policy="rule", price=0.0,
        retain_loader=old, twin=False, callbacks=[lambda record: seen.append(accuracy(model, old))],
    )  # fmt: skip
    figures = {name: each.accuracy for name, each in result.old_data.items()}
    assert figures["before"] == known
    assert figures["after"] == accuracy(model, old)
    assert result.seeds
    # Nothing that was learned has changed.
    assert figures["stripped"] == known
    assert [record.old_data and record.old_data.accuracy for record in result.history] == seen
    text = capsys.readouterr().out
    assert f"old data accuracy {100 * (seen[0] or 0):.1f} %" in text
    assert result.verdict().splitlines()[-1] == (
        f"old data: accuracy {100 * (known or 0):.1f} % before, accuracy "
        f"{100 * (figures['after'] or 0):.1f} % now, accuracy {100 * (known or 0):.1f} % without "
        "the seeds"
    )
