"""Controls that ship with Esper, so that a policy can be placed between them at once."""

import gzip
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path

import msgspec
import numpy as np

from esper.leyline.errors import UsageError
from esper_lab.evaluation import COLUMNS, Rung

FOLDER = Path(str(files("esper_lab"))) / "shipped"
"""Folder with a file for each suite."""
DIGITS = 5
"""Decimal places of the stored numbers; utility is a fraction."""


class ShippedControls(msgspec.Struct, frozen=True):
    """The rungs of all controls of a suite on its first H fresh hosts.

    Attributes:
        identity: see ``controls.controls_identity``.
        origin: version and machine that played them, and when.
        training_hosts: number of hosts on which the rules were tuned.
        hosts: H.
        rungs: the controls from the bottom up.
    """

    identity: str
    origin: str
    training_hosts: int
    hosts: int
    rungs: list[Rung]

    def usable(
        self, training: int, fresh: int, of_other_hosts: Callable[[], bool], why: str | None = None
    ) -> tuple["ShippedControls | None", str | None]:
        """The controls if an evaluation can use them, or a line that says why not.

        Args:
            training: number of its training hosts.
            fresh: number of its fresh hosts; the first of those that were shipped.
            of_other_hosts: whether they were played on other hosts, or with other plans.
            why: a reason that is known already.
        """
        if training != self.training_hosts:
            why = f"were tuned on {self.training_hosts} hosts"
        elif fresh > self.hosts:
            why = f"are of {self.hosts} hosts"
        elif why is None and of_other_hosts():
            why = "are of other tasks, plans or rules"
        if why is None:
            return self, None
        return None, f"The controls are played here, because those that ship with Esper {why}."

    def first(self, hosts: int) -> list[Rung]:
        """The rungs on the first hosts."""
        return [_with_columns(rung, lambda values: values[:hosts]) for rung in self.rungs]


def difference_text(utility: Sequence[float], never: Rung) -> str:
    """How far the first hosts, played here without growth, differ from those played elsewhere.

    Another processor rounds otherwise, which also changes the hosts that were trained before.
    """
    change = np.subtract(utility, never.utility[: len(utility)])
    difference = round(100.0 * float(np.mean(change)), 1) + 0.0
    return f"never growing differs here by {difference:+.1f} points"


def shipped_suites() -> list[str]:
    """Names of the suites whose controls ship with Esper."""
    return sorted(path.name.removesuffix(".json.gz") for path in FOLDER.glob("*.json.gz"))


def shipped_controls(suite: str) -> ShippedControls | None:
    """The controls of a suite that ship with Esper; None if there are none.

    Raises:
        UsageError: the file is damaged.
    """
    if suite not in shipped_suites():
        return None
    path = FOLDER / f"{suite}.json.gz"
    try:
        content = gzip.decompress(path.read_bytes())
        return msgspec.json.decode(content, type=ShippedControls)
    except (OSError, EOFError, ValueError, msgspec.MsgspecError) as error:
        raise UsageError(
            f"fresh: cannot read the controls that ship with Esper ({path.name}: {error}); "
            "give --fresh to play them anew"
        ) from error


def write_shipped(suite: str, controls: ShippedControls) -> Path:
    """Write the controls of a suite, rounded; return the file."""

    def decimals(values: list[float]) -> list[float]:
        return [round(value, DIGITS) for value in values]

    rungs = [_with_columns(rung, decimals) for rung in controls.rungs]
    content = msgspec.structs.replace(controls, rungs=rungs)
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{suite}.json.gz"
    path.write_bytes(gzip.compress(msgspec.json.encode(content), mtime=0))
    return path


def _with_columns(rung: Rung, change: Callable[[list[float]], list[float]]) -> Rung:
    columns = ((name, getattr(rung, name)) for name in COLUMNS)
    return msgspec.structs.replace(rung, **{name: change(each) for name, each in columns if each})
