"""Joining the evaluations of the parts of a suite, which were played one after another."""

from collections.abc import Sequence
from typing import Any

import msgspec

from esper.leyline.evaluation import Evaluation, Rung


def joined(evaluations: Sequence[Evaluation]) -> Evaluation:
    """The evaluations of several parts as one; rungs that a part lacks are left out.

    What does not differ by host is that of the first part.
    """
    first = evaluations[0]
    names = [{rung.name for rung in found.rungs} for found in evaluations]
    common = [rung.name for rung in first.rungs if all(rung.name in own for own in names)]
    tables = [{rung.name: rung for rung in found.rungs} for found in evaluations]
    return msgspec.structs.replace(
        first,
        tasks=[task for found in evaluations for task in found.tasks],
        rungs=[joined_rungs([own[name] for own in tables]) for name in common],
        splits=[split for found in evaluations for split in found.splits],
        rents=[price for found in evaluations for price in found.rents],
    )


def joined_rungs(rungs: Sequence[Rung]) -> Rung:
    """The same rung on the hosts of several parts as one."""

    def column(name: str) -> list[Any]:
        return [value for rung in rungs for value in getattr(rung, name)]

    first = rungs[0]
    columns = "utility", "validation", "added", "chosen", "score"
    there = [name for name in columns if getattr(first, name) is not None]
    return msgspec.structs.replace(first, **{name: column(name) for name in there})
