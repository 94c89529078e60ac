"""What ``esper.check`` reads of a loader: its size, labels, and numbers that are not finite."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from time import monotonic
from typing import Any

from torch import Tensor

from esper.own_models.samples import Unpack, sample_count, undisturbed

DATA_SECONDS = 5.0
"""Time spent on reading the loader; what was not read by then is not in the figures."""
RARE = 0.1
"""A class with less than this part of the mean count is reported as rare."""
IGNORED = -100
"""The label that cross_entropy leaves out."""


@dataclass
class DataFindings:
    """What was found in a loader; see ``CheckReport``.

    Attributes:
        batches: minibatches in an epoch; those read if the loader has no length.
        class_counts: samples read of each class, by label; empty without classes.
        problems: what will not work, one line each.
        remarks: what may surprise, one line each.
    """

    batches: int = 0
    class_counts: dict[int, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def read_data(
    loader: Iterable[Any], unpack: Unpack, has_labels: bool, classes: int | None
) -> DataFindings:
    """Read a loader for ``DATA_SECONDS``.

    Args:
        loader: the training data.
        unpack: splits a batch into inputs and target.
        has_labels: whether targets are classes.
        classes: classes that the module tells apart; None if that is unknown.
    """
    begun, read, bad, sizes = monotonic(), 0, 0, set()
    counts: dict[int, int] = {}
    with undisturbed(loader):
        for batch in loader:
            inputs, target = unpack(batch)
            read += 1
            sizes.add(sample_count(inputs))
            fine = all(_finite(x) or _masks(x) for x in _floats(inputs))
            bad += not (fine and all(map(_finite, _floats(target))))
            if has_labels and isinstance(target, Tensor) and not target.is_floating_point():
                labels, found = target.unique(return_counts=True)
                for label, number in zip(labels.tolist(), found.tolist(), strict=True):
                    counts[int(label)] = counts.get(int(label), 0) + number
            if monotonic() - begun > DATA_SECONDS:
                break
    known = length(loader)
    findings = DataFindings(read if known is None else known)
    if read < findings.batches:
        findings.remarks.append(f"only {read:,} of {findings.batches:,} minibatches were read")
    if bad:
        findings.problems.append(
            f"loader: {bad} of {read} minibatches hold NaN or infinite numbers"
        )
    if 1 in sizes:
        findings.remarks.append(
            "a minibatch has one sample, which BatchNorm refuses: drop_last=True"
        )
    if has_labels:
        findings.class_counts = {label: n for label, n in sorted(counts.items()) if label >= 0}
        negative = [label for label in counts if label < 0 and label != IGNORED]
        if negative:
            findings.problems.append(f"loader: a label is {max(negative)}; count from 0")
        _check_labels(findings, classes)
    return findings


def _check_labels(findings: DataFindings, classes: int | None) -> None:
    counts = findings.class_counts
    if not counts:
        findings.remarks.append("the target holds no integer labels: class balance is unknown")
        return
    mean = sum(counts.values()) / len(counts)
    rare = [label for label, number in counts.items() if number < RARE * mean]
    if rare:
        shown = ", ".join(str(label) for label in islice(rare, 5))
        findings.remarks.append(f"{len(rare)} of {len(counts)} classes are rare, such as {shown}")
    largest = max(counts)
    if classes is not None and largest >= classes:
        findings.problems.append(
            f"loader: a label is {largest}, but the model has {classes} outputs; count from 0"
        )


def length(data: Any) -> int | None:
    """The length of a loader or dataset; None if it has none.

    A ``DataLoader`` always has ``__len__``, which fails if its dataset has no length.
    """
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def size(loader: Any) -> str:
    """Samples in a loader, its minibatches if the dataset has no length."""
    samples, batches = length(getattr(loader, "dataset", None)), length(loader)
    if samples is not None:
        return f"{samples:,}"
    return "of unknown size" if batches is None else f"{batches:,} minibatches"


def kind(target: Any) -> str:
    """Dtype and shape of a target."""
    if isinstance(target, Tensor):
        return f"{str(target.dtype).removeprefix('torch.')} {list(target.shape)}"
    return type(target).__name__


def _finite(x: Tensor) -> bool:
    return bool(x.isfinite().all())


def _masks(x: Tensor) -> bool:
    """Whether it is an additive attention mask: 0, and -inf where nothing is attended to."""
    zero = x == 0
    return bool(zero.any()) and bool((zero | x.isneginf()).all())


def _floats(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    parts = value.values() if isinstance(value, Mapping) else value
    if not isinstance(value, Mapping | tuple | list):
        return []
    return [x for part in parts for x in _floats(part)]
