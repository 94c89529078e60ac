"""What training and growing a module returned, beside its twin that never grew."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from esper.own_models.attachment import grown_seeds
from esper.own_models.history import EpochRecord, draw
from esper.own_models.table_text import aligned
from esper.own_models.validation import Validation
from esper.own_models.written_code import save_grown
from esper.tamiyo.policy.features import utility

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def comparable(net_score: float) -> float:
    """A net score, and below all others one that is not a number: its training diverged."""
    return float("-inf") if isnan(net_score) else net_score


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

    @property
    def seeds(self) -> dict[str, str]:
        """Blueprint of each seed, by the name of the module behind which it hangs."""
        return {name: seed.blueprint for name, seed in grown_seeds(self.model).items()}

    @property
    def worth(self) -> float:
        """Validation score minus the price of the parameters added."""
        added = torch.tensor([self.parameters - self.host_parameters])
        score = torch.tensor([self.validation.score])
        return float(utility(score, added, self.host_parameters, torch.tensor([self.price])))

    @property
    def paid(self) -> bool:
        """Whether the module is worth more than its twin. False if nothing grew, or without one."""
        if self.twin is None or not self.seeds:
            return False
        return comparable(self.worth) > comparable(self.twin.worth)

    @property
    def better(self) -> "GrowthResult":
        """The result to use: the twin if growth did not pay, unless the twin alone diverged."""
        if self.twin is None or self.paid or (isnan(self.twin.worth) and not isnan(self.worth)):
            return self
        return self.twin

    def comparison(self) -> str:
        """The module beside its twin: validation, test, parameters and time, a line each."""
        rows = [("trained" if self.twin is None else "grown", self)]
        if self.twin is not None:
            rows.append(("never grown", self.twin))
        cells = [("", "test", "validation", "parameters", "time")]
        for name, result in rows:
            test = "not given" if result.test is None else result.test.shown()
            validation = result.validation.shown()
            size, time = f"{result.parameters:,}", f"{result.seconds:,.1f} s"
            cells.append((name, test, validation, size, time))
        return "\n".join(aligned(cells, left=3))

    def plot(self, path: str | Path | None = None) -> "Figure":
        """See ``history.draw``."""
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
        return save_grown(self.model, folder)

    def plain(self) -> dict[str, Any]:
        """All but the module and the twin, as numbers, texts, lists and dicts."""
        return {
            "history": [record.plain() for record in self.history],
            "validation": asdict(self.validation),
            "test": None if self.test is None else asdict(self.test),
            "parameters": self.parameters,
            "host_parameters": self.host_parameters,
            "seconds": self.seconds,
            "price": self.price,
            "tries": self.tries,
        }

    @classmethod
    def from_plain(cls, model: nn.Module, plain: Mapping[str, Any]) -> Self:
        """The inverse of ``plain``, for the module it was about."""
        test = plain["test"]
        made = {
            "history": [EpochRecord.from_plain(record) for record in plain["history"]],
            "validation": Validation(**plain["validation"]),
            "test": None if test is None else Validation(**test),
        }
        return cls(model, **{**plain, **made})
