"""``esper.grow`` that is interrupted resumes bit-identically, as does its never-grown twin."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.leyline.errors import UsageError
from esper.own_models import training_loop
from own_modules import ResidualNet, images, loader, unchanged

EPOCHS = 10


class Cut(Exception):
    """Where a process is killed."""


def with_generator() -> DataLoader:
    generator = torch.Generator().manual_seed(5)
    return DataLoader(TensorDataset(*images(32)), 16, shuffle=True, generator=generator)


SCHEDULERS = {
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, EPOCHS),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, 0.02, total_steps=2 * EPOCHS),
}


def grown(
    path: Path | None, cut: int | None = None, scheduler: str = "cosine", **more: Any
) -> esper.GrowthResult:
    """Grow; with ``cut``, fail after so many epochs of this call."""
    torch.manual_seed(0)
    epochs = 0

    def callback(_: esper.EpochRecord) -> None:
        nonlocal epochs
        epochs += 1
        if epochs == cut:
            raise Cut

    arguments: dict[str, Any] = {"policy": "rule", "epochs": EPOCHS, "twin": True, "price": 0.001}
    return esper.grow(
        ResidualNet(), with_generator(), loader(*images(32, 1)), test_loader=loader(*images(16, 2)),
        callbacks=[callback], scheduler=SCHEDULERS[scheduler], checkpoint=path, progress=False,
        **arguments | more,
    )  # fmt: skip


def same(one: esper.GrowthResult | None, two: esper.GrowthResult | None) -> None:
    assert one is not None
    assert two is not None
    assert one.history == two.history
    assert (one.validation, one.test, one.tries) == (two.validation, two.test, two.tries)
    assert unchanged(two.model, one.model.state_dict())


@pytest.mark.parametrize(
    ("tries", "scheduler"), [(1, "cosine"), (2, "one cycle")], ids=["once", "best of two"]
)
def test_an_interrupted_call_resumes_bit_identically(
    tries: int, scheduler: str, tmp_path: Path
) -> None:
    more: dict[str, Any] = {"tries": tries, "scheduler": scheduler}
    whole = grown(None, **more)
    assert any("BLENDING" in text for r in whole.history for text in r.actions)
    path = tmp_path / "growth.pt"
    # Also where growth began, ended, and where one variant follows the other.
    for cut in (1, 3, 5, 2, 4):
        with pytest.raises(Cut):
            grown(path, cut, **more)
    again = grown(path, **more)
    same(whole, again)
    same(whole.twin, again.twin)
    begun = path.read_bytes()
    finished = grown(path, 1, **more)
    same(whole, finished)
    assert path.read_bytes() == begun


def test_the_time_of_a_resumed_call_includes_that_of_the_first(tmp_path, monkeypatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(training_loop, "monotonic", lambda: float(next(clock)))
    path, more = tmp_path / "growth.pt", {"twin": False, "policy": "never"}
    with pytest.raises(Cut):
        grown(path, 8, **more)
    begin = next(clock)
    again = grown(path, **more)
    assert again.seconds > next(clock) - begin
    assert again.seconds == pytest.approx(grown(None, **more).seconds, abs=4)


def test_progress_counts_the_epochs_that_are_left(tmp_path: Path, monkeypatch) -> None:
    totals, phase = [], training_loop.phase

    def counted(name: str, *more: Any) -> Any:
        totals.append((name, *more))
        return phase(name, *more)

    monkeypatch.setattr(training_loop, "phase", counted)
    path, more = tmp_path / "growth.pt", {"twin": False, "policy": "never"}
    with pytest.raises(Cut):
        grown(path, 4, **more)
    grown(path, **more)
    # The epoch in which a process is killed is trained again.
    assert [each for each in totals if each[0] == "training"] == [
        ("training", EPOCHS, "epochs"),
        ("training", EPOCHS - 3, "epochs"),
    ]


def test_the_twin_is_a_plain_run_of_the_same_module() -> None:
    both = grown(None)
    alone = grown(None, policy="never", twin=False)
    same(alone, both.twin)
    assert alone.twin is None
    assert not alone.paid
    assert alone.better is alone
    assert both.twin is not None
    assert both.host_parameters == both.twin.parameters
    text = both.comparison().splitlines()
    assert [line.split("  ")[0] for line in text[1:]] == ["grown", "never grown"]
    assert f"accuracy {100 * both.twin.test.accuracy:.1f} %" in text[2]
    assert f"{both.parameters:,}" in text[1]


def test_growth_pays_if_it_is_worth_more_than_its_price_on_validation() -> None:
    result = grown(None, epochs=16)
    assert result.twin is not None
    assert result.seeds
    added = torch.tensor(result.parameters / result.host_parameters).log()
    assert result.worth == pytest.approx(
        result.validation.accuracy - 0.001 * float(added), abs=1e-6
    )
    result.twin.validation = esper.Validation(0.1, result.worth - 0.01)
    assert result.paid
    assert result.better is result
    result.twin.validation = esper.Validation(0.1, result.worth + 0.01)
    assert not result.paid
    assert result.better is result.twin


def test_a_loss_is_scored_on_the_same_scale_for_both_and_on_test() -> None:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(output, target)

    result = grown(None, loss=loss, policy="heuristic", epochs=4)
    assert result.twin is not None
    for each in (result, result.twin):
        assert each.test is not None
        validations = result.history[0].validation, each.validation, each.test
        shares = [(1.0 - v.score) / v.loss for v in validations]
        assert shares == pytest.approx(shares[:1] * 3)


def test_a_checkpoint_of_another_call_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "growth.pt"
    with pytest.raises(Cut):
        grown(path, 2)
    written = path.read_bytes()
    for change, says in (
        ({"epochs": 12}, "epochs: growth in .* began with 10, got 12"),
        ({"policy": "heuristic"}, "policy: growth in .* began with rule, got heuristic"),
        ({"seed": 3}, "seed: growth in .* began with 0, got 3"),
    ):
        with pytest.raises(UsageError, match=says):
            grown(path, **change)
    train, held_back = with_generator(), loader(*images(32, 1))
    more: dict[str, Any] = {"policy": "rule", "epochs": EPOCHS, "twin": True, "price": 0.001}
    with pytest.raises(UsageError, match=r"model: growth in .* began with other parameters") as e:
        esper.grow(ResidualNet(6), train, held_back, checkpoint=path, progress=False, **more)
    assert "\n" not in str(e.value)
    assert path.read_bytes() == written
    path.write_bytes(written[:-100])
    with pytest.raises(UsageError, match=r"checkpoint: .* is damaged or not a checkpoint"):
        grown(path)
    with pytest.raises(UsageError, match="checkpoint: cannot write"):
        grown(tmp_path / "none" / "growth.pt")
