"""Conversion of the rollout of a round to the columns of a record."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow
import torch
from numpy.typing import NDArray
from torch import Tensor

import esper
from esper.leyline.actions import BLUEPRINTS, CHOICES, HEADS, Op
from esper.leyline.records import FORMAT_VERSION, Layout, RecordedTask, RecordHeader, record_schema
from esper.runtime.tasks import Task
from esper.simic.rollout import Rollout
from esper.tamiyo.policy.features import CRITIC_FEATURES, HOST_FEATURES, SLOT_FEATURES, Observation


def current_layout() -> Layout:
    """The layout of observations and actions in this process, with the blueprints registered."""
    options = {head: [str(option) for option in CHOICES[head]] for head in CHOICES}
    return Layout(
        host=list(HOST_FEATURES),
        slots=list(SLOT_FEATURES),
        critic=list(CRITIC_FEATURES),
        heads=list(HEADS),
        options={"op": [op.name for op in Op], "blueprint": list(BLUEPRINTS), **options},
    )


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """A rollout of N whole episodes of T steps, and what it does not say of itself.

    Attributes:
        round: number of the round, from 1.
        policy: name of the policy that acted.
        rollout: observations, actions, log-probs, rewards and ends.
        environments: identities of the environments, int64 ``[N]``.
        twins: number of each environment's never-grow twin, int64 ``[N]``.
        tasks: task of each environment in this round.
        values: the critic's estimates in units of reward, ``[T, N]``; None without a critic.
        twin_scores: score of each environment's twin after each step, ``[T, N]``.
    """

    round: int
    policy: str
    rollout: Rollout[Observation]
    environments: Tensor
    twins: Tensor
    tasks: Sequence[Task]
    values: Tensor | None
    twin_scores: Tensor

    def header(self, run: str) -> RecordHeader:
        """What the record of the run ``run`` says about itself."""
        steps, count = self.rollout.actions.shape[:2]
        return RecordHeader(
            format=FORMAT_VERSION,
            run=run,
            round=self.round,
            policy=self.policy,
            episodes=count,
            steps=steps,
            tasks=self.recorded_tasks,
            layout=current_layout(),
            esper=esper.__version__,
        )

    def table(self) -> pyarrow.Table:
        """The columns of the record."""
        return record_table(self)

    @property
    def recorded_tasks(self) -> dict[str, RecordedTask]:
        """The tasks of this round by their own name."""
        return {
            task.name: RecordedTask(task=task.label, slots=[s.name for s in task.host.slots])
            for task in dict.fromkeys(self.tasks)
        }


def record_table(record: RoundRecord) -> pyarrow.Table:
    """The columns of a record: one row per environment and step, the steps of each together."""
    rollout, observation = record.rollout, record.rollout.observation
    assert rollout.valid is None, "only rollouts of whole episodes are recorded"
    steps, count = rollout.actions.shape[:2]
    slots = np.repeat([len(task.host.slots) for task in record.tasks], steps)
    layout = current_layout()
    schema = record_schema(layout)

    def per_environment(values: Any) -> Any:
        return np.repeat(np.asarray(values), steps)

    def names(values: list[str]) -> pyarrow.DictionaryArray:
        distinct = list(dict.fromkeys(values))
        indices = np.array([distinct.index(value) for value in values], dtype=np.int32)
        return pyarrow.DictionaryArray.from_arrays(per_environment(indices), distinct)

    def slot_lists(x: NDArray[Any], name: str) -> pyarrow.Array:
        """Rows of the slots that a host has; the others pad it to the widest of the round."""
        inside = np.arange(x.shape[1]) < slots[:, None]
        offsets = np.concatenate([[0], np.cumsum(slots)]).astype(np.int32)
        inner = array_of(x[inside], schema.field(name).type.value_type)
        return pyarrow.ListArray.from_arrays(offsets, inner)

    def field_column(x: Tensor, name: str) -> pyarrow.Array:
        return array_of(_rows(x), schema.field(name).type)

    masks = observation.masks
    value = record.values
    columns = {
        "round": np.full(steps * count, record.round),
        "environment": per_environment(record.environments.cpu()),
        "step": np.tile(np.arange(1, steps + 1), count),
        "task": names([task.label for task in record.tasks]),
        "draw": names([task.name for task in record.tasks]),
        "twin": per_environment(record.twins.cpu()),
        "host": field_column(observation.host, "host"),
        "slots": slot_lists(_rows(observation.slots), "slots"),
        "blueprints": slot_lists(_rows(observation.blueprints), "blueprints"),
        "critic": field_column(observation.critic, "critic"),
        "legal_ops": slot_lists(_rows(masks.slots.transpose(-1, -2)), "legal_ops"),
        "legal_blueprints": slot_lists(_rows(masks.kinds), "legal_blueprints"),
        "actions": field_column(rollout.actions, "actions"),
        "log_prob": _rows(rollout.log_prob),
        "value": pyarrow.nulls(steps * count) if value is None else _rows(value),
        "reward": _rows(rollout.rewards),
        "terminated": _rows(rollout.terminated),
        "truncated": _rows(rollout.truncated),
        "twin_score": _rows(record.twin_scores),
    }
    arrays = [
        column.cast(field.type)
        if isinstance(column := columns[field.name], pyarrow.Array)
        else pyarrow.array(column, type=field.type)
        for field in schema
    ]
    return pyarrow.table(arrays, schema=schema)


def _rows(x: Tensor) -> NDArray[Any]:
    """``x [T, N, ...]`` as rows ``[N T, ...]``, float64 as float32."""
    x = x.float() if x.dtype == torch.float64 else x
    rows: NDArray[Any] = x.detach().transpose(0, 1).flatten(0, 1).cpu().contiguous().numpy()
    return rows


def array_of(
    x: NDArray[Any], kind: pyarrow.DataType, absent: NDArray[np.bool_] | None = None
) -> pyarrow.Array:
    """Rows as an array of ``kind``, numbers or lists of one length; null where ``absent``."""
    if not pyarrow.types.is_fixed_size_list(kind):
        return pyarrow.array(np.ascontiguousarray(x), type=kind, mask=absent)
    flat = pyarrow.array(np.ascontiguousarray(x).reshape(-1), type=kind.value_type)
    mask = None if absent is None else pyarrow.array(absent)
    return pyarrow.FixedSizeListArray.from_arrays(flat, kind.list_size, mask=mask)
