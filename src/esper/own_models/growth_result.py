"""What happened while a module grew, and its result."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import isnan, log
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from msgspec import convert, to_builtins
from torch import nn

from esper.leyline.stages import Stage
from esper.own_models.attachment import grown_seeds
from esper.own_models.objectives import Validation

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class EpochOutcome:
    """What happened after an epoch.

    Attributes:
        validation: validation of the module; after a rollback, of what was restored.
        contributions: score with the seed minus that without it, by slot with an acting seed.
        actions: what was done and why, one line each.
    """

    validation: Validation
    contributions: dict[str, float] = field(default_factory=dict)
    actions: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """One epoch of growth.

    Attributes:
        epoch: number of the epoch, from 1.
        train_loss: mean training loss; None if the training loop did not report it.
        validation: validation after the epoch.
        parameters: parameters of the module and of all its seeds.
        added: parameters of the seeds that act on the output.
        stages: stage of each slot after the epoch's action, by slot.
        contributions: score with the seed minus that without it, by slot with an acting seed.
        actions: what was done after the epoch and why, one line each.
        old_data: validation on data that the module knew before; None without such data.
    """

    epoch: int
    train_loss: float | None
    validation: Validation
    parameters: int
    added: int
    stages: dict[str, Stage]
    contributions: dict[str, float]
    actions: list[str] = field(default_factory=list)
    old_data: Validation | None = None

    def line(self, epochs: int) -> str:
        """The record in one line."""
        result = self.validation
        train = "" if self.train_loss is None else f"train {self.train_loss:.4f}  "
        loss = "" if result.unit == "loss" else f"loss {result.loss:.4f}  "
        text = f"epoch {self.epoch:>3}/{epochs}  {train}{loss}{result.shown()}"
        text = f"{text}  {self.parameters:,} parameters"
        if self.old_data is not None:
            text = f"{text}  old data {self.old_data.shown()}"
        return "\n".join([text, *(f"    {action}" for action in self.actions)])


def comparable(net_score: float) -> float:
    """A net score, and below all others one that is not a number: its training diverged."""
    return float("-inf") if isnan(net_score) else net_score


def price_of(price: float, growth: float) -> float:
    """What growth by a factor costs, in the unit of a net score."""
    return price * log(growth)


@dataclass
class GrowthResult:
    """A module that was trained and grown.

    Attributes:
        model: the module that was passed, grown in place: of the same class, trainable, with seeds
            as submodules called ``seed``.
        history: what happened, by epoch.
        validation: validation of the finished module.
        test: the same on the test split; None without one.
        parameters: parameters of the finished module.
        host_parameters: parameters of the module before it grew.
        seconds: wall time of the try that was kept.
        price: price of parameters, see ``grow``.
        tries: validation score minus price of each try.
        twin: a copy of the module that was trained alike and never grew; None without one.
        difference: 95 % interval of the figure of the module minus the twin's, over the samples of
            the validation split and, if there is one, the test split, by name of the split; empty
            without a twin, or where the figure is not a mean over samples.
        widths: by the name of each layer that became wider, the attributes in which it holds its
            sizes, before and after.
        old_data: validation on the data of ``retain_loader``: ``before`` training, ``after`` it,
            and ``stripped`` of the seeds.
        copies: stack and place of each block behind which a copy of it was inserted, in order.
    """

    model: nn.Module
    history: list[EpochRecord]
    validation: Validation
    test: Validation | None
    parameters: int
    host_parameters: int
    seconds: float
    price: float
    tries: list[float] = field(default_factory=list)
    twin: "GrowthResult | None" = None
    difference: dict[str, tuple[float, float]] = field(default_factory=dict)
    widths: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)
    old_data: dict[str, Validation] = field(default_factory=dict)
    copies: list[tuple[str, int]] = field(default_factory=list)

    @property
    def seeds(self) -> dict[str, str]:
        """Blueprint of each seed, by the name of the module behind which it hangs."""
        return {name: seed.blueprint for name, seed in grown_seeds(self.model).items()}

    @property
    def grew(self) -> bool:
        """Whether the module has other parameters than before."""
        return self.parameters != self.host_parameters

    @property
    def cost(self) -> float:
        """Price of the parameters added, in the unit of ``validation.net``."""
        return price_of(self.price, self.parameters / self.host_parameters)

    @property
    def worth(self) -> float:
        """``validation.net`` minus the price of the parameters added."""
        return self.validation.net - self.cost

    @property
    def paid(self) -> bool:
        """Whether the module is worth more than its twin. False if nothing grew, or without one."""
        if self.twin is None or not self.grew:
            return False
        return comparable(self.worth) > comparable(self.twin.worth)

    @property
    def better(self) -> "GrowthResult":
        """The result to use: the twin if growth did not pay, unless the twin alone diverged."""
        if self.twin is None or self.paid or (isnan(self.twin.worth) and not isnan(self.worth)):
            return self
        return self.twin

    def comparison(self) -> str:
        """See ``verdict.comparison``."""
        from esper.own_models.verdict import comparison

        return comparison(self)

    def verdict(self) -> str:
        """See ``verdict.verdict``."""
        from esper.own_models.verdict import verdict

        return verdict(self)

    def plot(self, path: str | Path | None = None) -> "Figure":
        """See ``growth_picture.draw``."""
        from esper.own_models.growth_picture import draw

        return draw(self.history, path)

    def save(self, folder: str | Path) -> Path:
        """Write ``state_dict.pt`` and ``rebuild.py``, which together need torch but not Esper.

        ``rebuild.rebuild(model, "state_dict.pt")`` turns a module built as before it grew into the
        grown one.

        Args:
            folder: made if it does not exist.

        Returns:
            the folder.
        """
        from esper.own_models.written_code import save_grown

        return save_grown(self.model, folder, self.widths, self.copies)

    def plain(self) -> dict[str, Any]:
        """All but the module and the twin, as numbers, texts, lists and dicts."""
        parts = {f.name: getattr(self, f.name) for f in fields(self)}
        del parts["model"], parts["twin"]
        content: dict[str, Any] = to_builtins(parts)
        return content

    @classmethod
    def from_plain(cls, model: nn.Module, plain: Mapping[str, Any]) -> Self:
        """The inverse of ``plain``, for the module it was about."""
        types = {f.name: f.type for f in fields(cls) if f.name in plain}
        return cls(model, **{name: convert(plain[name], types[name]) for name in plain})
