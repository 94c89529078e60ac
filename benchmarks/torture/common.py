"""What the parts share: small runs, what is left of them, and what a part found."""

import contextlib
import io
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from esper.simic.run.checkpoint import load_latest
from esper.simic.training.vectorized import resume_ppo, train_ppo_vectorized

ROOT = Path(__file__).parents[2]
for _place in ("tests", "tests/simic/run", "tests/scripts", "tests/karn", "tests/kasmina"):
    sys.path.insert(0, str(ROOT / _place))

TINY: dict[str, Any] = {
    "task": "digits",
    "envs": 2,
    "group_size": 2,
    "episode_length": 2,
    "max_batches": 1,
    "batch_size": 4,
    "lstm_hidden": 8,
    "seed": 5,
    "threads": 1,
    "backend": "torch",
}
"""The smallest run with an update."""


@dataclass
class Part:
    """What a part tried.

    Attributes:
        what: what it did, in words.
        tried: how often.
        lost: one line for each thing that was lost or that went wrong.
        notes: what else is to be told.
        seconds: how long it took.
    """

    what: str
    tried: int = 0
    lost: list[str] = field(default_factory=list)
    notes: str = ""
    seconds: float = 0.0


@contextlib.contextmanager
def timed(part: Part) -> Iterator[Part]:
    """Measure how long a part takes; an exception within it is something lost."""
    begin = time.monotonic()
    try:
        yield part
    except Exception as error:
        part.lost.append(f"the part ended: {type(error).__name__}: {error}")
    finally:
        part.seconds += time.monotonic() - begin


def trained(folder: Path, rounds: int, **settings: Any) -> Path:
    """Return the directory of a new run of this process."""
    named = {**TINY, "keep_checkpoints": rounds + 9, **settings}
    with quiet():
        return train_ppo_vectorized(rounds=rounds, telemetry_dir=str(folder), **named).path


def resumed(run: Path, rounds: int) -> None:
    """Resume a run in this process.

    Raises:
        UsageError: it is refused.
    """
    with quiet():
        resume_ppo(run, {"rounds": rounds})


@contextlib.contextmanager
def quiet() -> Iterator[io.StringIO]:
    """Within the context, nothing is printed; yields what stderr would have shown."""
    told = io.StringIO()
    with contextlib.redirect_stderr(told), contextlib.redirect_stdout(io.StringIO()):
        yield told


def fresh(run: Path, place: Path) -> Path:
    """A copy of a run, in place of an earlier one."""
    shutil.rmtree(place, ignore_errors=True)
    return Path(shutil.copytree(run, place))


def differs(run: Path, reference: Path) -> str:
    """What differs between the last checkpoints of two runs; empty if nothing."""
    from small_runs import assert_same

    one, other = load_latest(run), load_latest(reference)
    if one.round != other.round:
        return f"round {one.round} instead of {other.round}"
    try:
        assert_same(one.parts, other.parts)
    except AssertionError:
        return f"other bits in round {one.round}"
    return ""
