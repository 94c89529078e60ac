"""Whole episodes read from the records of one or more runs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.leyline.errors import UsageError, first_line
from esper.leyline.records import (
    Layout,
    Record,
    RecordHeader,
    VerifiedRecords,
    record_files,
    record_schema,
)
from esper.simic.records.record_columns import current_layout
from esper.tamiyo.policy.features import Observation


@dataclass(frozen=True, slots=True)
class Episodes:
    """M whole episodes, padded to the longest, T steps, and to the host with the most slots.

    A slot that pads a host has zeros as features and no legal option. A step after the end of an
    episode repeats the first step with reward 0, so that it has legal options.

    Attributes:
        observation: not normalised, leading axes ``[T, M]``.
        actions: int64 ``[T, M, heads]``.
        log_prob: log-probability of the actions under the policy that acted, ``[T, M]``.
        values: the critic's estimates in units of reward, ``[T, M]``; NaN without a critic.
        rewards: ``[T, M]``.
        terminated, truncated: whether the episode ended with this step or was cut off after it,
            bool ``[T, M]``.
        twin_scores: score of the never-grow twin after the step, ``[T, M]``.
        lengths: steps of each episode, int64 ``[M]``.
        environments, rounds, twins: environment, round and twin of each episode, int64 ``[M]``;
            within one round of one run, episodes with the same twin share host and data.
        tasks, draws: name of each task or its family, and of the task itself.
        runs: directory of each episode's run.
        policies: name of the policy that acted.
    """

    observation: Observation
    actions: Tensor
    log_prob: Tensor
    values: Tensor
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    twin_scores: Tensor
    lengths: Tensor
    environments: Tensor
    rounds: Tensor
    twins: Tensor
    tasks: list[str]
    draws: list[str]
    runs: list[Path]
    policies: list[str]

    @property
    def count(self) -> int:
        """Number of episodes."""
        return len(self.lengths)

    @property
    def valid(self) -> Tensor:
        """Whether a step belongs to its episode, bool ``[T, M]``."""
        return torch.arange(len(self.actions))[:, None] < self.lengths


class RecordReader:
    """The records of some runs, file by file: iterating yields the episodes of one round each.

    Args:
        runs: run directories.
        skip_bad: whether to leave out damaged records, see ``VerifiedRecords``.

    Raises:
        UsageError: a run has no records, or is not a run directory.
    """

    def __init__(self, runs: Sequence[Path], skip_bad: bool = False):
        for run in runs:
            if not (run / "config.json").is_file():
                raise UsageError(
                    f"records: {run} is not a run directory; esper runs lists your runs"
                )
            if not record_files(run):
                raise UsageError(f"records: {run} has no records; train a run with --record")
        self._records = VerifiedRecords(runs, skip_bad)

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Episodes]:
        """Yield the episodes of each record, runs as given and rounds in order.

        Raises:
            UsageError: a record is damaged, and ``skip_bad`` is false; or it has another format,
                observation or action than this version.
        """
        return map(_episodes, self._records)

    @property
    def skipped(self) -> list[Path]:
        """Damaged records that the last iteration has left out so far."""
        return self._records.skipped


def read_episodes(runs: Sequence[Path], skip_bad: bool = False) -> Episodes:
    """All episodes of the records of some runs, in memory; see ``RecordReader``.

    Raises:
        UsageError: see ``RecordReader``; or every record is damaged.
    """
    reader = RecordReader(runs, skip_bad)
    parts = list(reader)
    if not parts:
        raise UsageError(f"records: all {len(reader)} records are damaged; give another run")
    return join_episodes(parts)


def join_episodes(parts: Sequence[Episodes]) -> Episodes:
    """The episodes of all parts, padded to the longest and to the host with the most slots."""
    steps = max(len(part.actions) for part in parts)
    slots = max(part.observation.slots.shape[-2] for part in parts)
    wide = [_observation_with(part.observation.tensors(), slots) for part in parts]

    def repetition(tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([_extension(x, steps, x[:1]) for x in tensors], 1)

    def zeros(name: str) -> Tensor:
        tensors = [getattr(part, name) for part in parts]
        return torch.cat([_extension(x, steps, torch.zeros_like(x[:1])) for x in tensors], 1)

    def each(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in parts])

    def entries(name: str) -> list[Any]:
        return [value for part in parts for value in getattr(part, name)]

    names = wide[0].keys()
    return Episodes(
        observation=Observation.from_tensors({n: repetition([w[n] for w in wide]) for n in names}),
        actions=repetition([part.actions for part in parts]),
        log_prob=repetition([part.log_prob for part in parts]),
        values=repetition([part.values for part in parts]),
        rewards=zeros("rewards"),
        terminated=zeros("terminated"),
        truncated=zeros("truncated"),
        twin_scores=repetition([part.twin_scores for part in parts]),
        lengths=each("lengths"),
        environments=each("environments"),
        rounds=each("rounds"),
        twins=each("twins"),
        tasks=entries("tasks"),
        draws=entries("draws"),
        runs=entries("runs"),
        policies=entries("policies"),
    )


def _extension(x: Tensor, steps: int, filling: Tensor) -> Tensor:
    missing = steps - len(x)
    return torch.cat([x, filling.expand(missing, *x.shape[1:])]) if missing else x


SLOT_AXIS = {"slots": -2, "blueprints": -1, "mask_slots": -1, "mask_kinds": -2}
"""The axis of slots in the tensors of an observation that have one."""


def _observation_with(tensors: dict[str, Tensor], slots: int) -> dict[str, Tensor]:
    """The tensors of an observation, padded to ``slots`` slots with zeros."""
    padded = dict(tensors)
    for name, axis in SLOT_AXIS.items():
        x = tensors[name]
        missing = slots - x.shape[axis]
        padded[name] = torch.nn.functional.pad(x, (0, 0) * (-axis - 1) + (0, missing))
    return padded


def _episodes(record: Record) -> Episodes:
    """The episodes of one record.

    Raises:
        UsageError: it has another layout than this version.
    """
    layout = record.header.layout
    if layout is None:
        raise UsageError(
            f"records: {record.path} is of a Gymnasium task, not of growing networks; "
            "esper query reads it as gym_records"
        )
    differences = current_layout().differences(layout)
    if differences:
        raise UsageError(
            f"records: {record.path} was made {'; '.join(differences)}; "
            "use the version and the plug-ins that made it"
        )
    try:
        table = pyarrow.parquet.read_table(pyarrow.BufferReader(record.content)).combine_chunks()
        _check_content(table, record.header, layout)
        return _episodes_of(record, table)
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        # Sealed, so not damaged: another program wrote it.
        raise UsageError(
            f"records: {record.path} does not hold what its header says ({first_line(error)}); "
            "give another run"
        ) from error


def _check_content(table: pyarrow.Table, header: RecordHeader, layout: Layout) -> None:
    """Refuse a table that is not one of the episodes that ``header`` describes.

    Raises:
        ValueError: it has other columns, another number of rows, or impossible actions.
    """
    rows = header.steps * header.episodes
    if not table.schema.equals(record_schema(layout)):
        raise ValueError("its columns are others")
    if min(header.steps, header.episodes) < 1 or table.num_rows != rows:
        raise ValueError(f"it has {table.num_rows} rows")
    actions = _numpy(table["actions"].combine_chunks())
    widths = [len(header.tasks[draw].slots) for draw in table["draw"].to_pylist()]
    for index, head in enumerate(layout.heads):
        options = layout.options.get(head)
        sizes = np.array(widths) if options is None else len(options)
        if ((actions[:, index] < 0) | (actions[:, index] >= sizes)).any():
            raise ValueError(f"its actions of head {head} are none of its options")


def _episodes_of(record: Record, table: pyarrow.Table) -> Episodes:
    header = record.header
    steps, count = header.steps, header.episodes
    widths = np.array([len(header.tasks[draw].slots) for draw in table["draw"].to_pylist()])
    inside = np.arange(widths.max()) < widths[:, None]

    def tensor(rows: NDArray[Any]) -> Tensor:
        table = torch.from_numpy(rows).unflatten(0, (count, steps))
        return table.transpose(0, 1).contiguous()

    def column(name: str) -> Tensor:
        return tensor(_numpy(table[name].combine_chunks()))

    def padded(name: str) -> Tensor:
        values = _numpy(table[name].combine_chunks().flatten())
        rows = np.zeros((*inside.shape, *values.shape[1:]), dtype=values.dtype)
        rows[inside] = values
        return tensor(rows)

    first = table.take(pyarrow.array(np.arange(count) * steps))
    return Episodes(
        observation=Observation.from_tensors(
            {
                "host": column("host"),
                "slots": padded("slots"),
                "blueprints": padded("blueprints").long(),
                "critic": column("critic"),
                "mask_slots": padded("legal_ops").transpose(-1, -2).contiguous(),
                "mask_kinds": padded("legal_blueprints"),
            }
        ),
        actions=column("actions").long(),
        log_prob=column("log_prob"),
        values=column("value"),
        rewards=column("reward"),
        terminated=column("terminated"),
        truncated=column("truncated"),
        twin_scores=column("twin_score"),
        lengths=torch.full((count,), steps),
        environments=torch.tensor(first["environment"].to_pylist()),
        rounds=torch.tensor(first["round"].to_pylist()),
        twins=torch.tensor(first["twin"].to_pylist()),
        tasks=first["task"].to_pylist(),
        draws=first["draw"].to_pylist(),
        runs=[record.run] * count,
        policies=[header.policy] * count,
    )


def _numpy(column: pyarrow.Array) -> NDArray[Any]:
    """A column as rows; a missing number is NaN."""
    lists = pyarrow.types.is_fixed_size_list(column.type)
    flat: NDArray[Any] = (column.flatten() if lists else column).to_numpy(zero_copy_only=False)
    # A copy, because memory of pyarrow must not be written to.
    return flat.reshape(-1, column.type.list_size).copy() if lists else flat.copy()
