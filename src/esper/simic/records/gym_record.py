"""Conversion of the rollout of a Gymnasium task to the columns of a record."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow
from numpy.typing import NDArray
from torch import Tensor

import esper
from esper.leyline.records import FORMAT_VERSION, GymLayout, RecordHeader, gym_record_schema
from esper.simic.records.record_columns import array_of
from esper.simic.rollout import Rollout
from esper.tamiyo.policy.recurrent import FlatObservation

DONE = ("legal", "actions", "numbers", "log_prob", "reward")
"""Columns of what was done, which is nothing in a final observation."""


@dataclass(frozen=True, slots=True)
class GymRecord:
    """A rollout of T steps of N environments, in which episodes begin and end.

    Attributes:
        round: number of the round, from 1.
        gym: id of the environment.
        policy: name of the policy that acted.
        rollout: observations, actions, log-probs, rewards and ends.
        lengths: steps of each environment's episode before the round, int64 ``[N]``.
        options: number of options of each head.
        numbers: Box actions as the environments took them, ``[T, N, components]``.
        values: the critic's estimates in units of reward, ``[T, N]``; None if they are not known.
    """

    round: int
    gym: str
    policy: str
    rollout: Rollout[FlatObservation]
    lengths: Tensor
    options: tuple[int, ...]
    numbers: NDArray[Any]
    values: Tensor | None

    @property
    def layout(self) -> GymLayout:
        """Meaning of observations and actions."""
        features = self.rollout.observation.features.shape[-1]
        options, components = list(self.options), self.numbers.shape[-1]
        return GymLayout(gym=self.gym, features=features, options=options, components=components)

    def header(self, run: str) -> RecordHeader:
        """See ``RoundContent.header``."""
        steps, ends = len(self.rollout.actions), self.rollout.terminated | self.rollout.truncated
        return RecordHeader(
            format=FORMAT_VERSION,
            run=run,
            round=self.round,
            policy=self.policy,
            episodes=int(ends.sum()),
            steps=steps,
            tasks={},
            gym=self.layout,
            esper=esper.__version__,
        )

    def table(self) -> pyarrow.Table:
        """See ``RoundContent.table``: the steps of each environment together."""
        rollout, layout = self.rollout, self.layout
        schema = gym_record_schema(layout)
        assert rollout.valid is not None
        steps, count = rollout.valid.shape
        final = ~_rows(rollout.valid)
        choices, heads = _rows(rollout.actions), len(layout.options)
        masks = _rows(rollout.observation.masks)
        exists = np.arange(masks.shape[-1]) < np.array(layout.options, np.int64)[:, None]
        columns: dict[str, Any] = {
            "round": np.full(steps * count, self.round),
            "environment": np.repeat(np.arange(count), steps),
            "step": _rows(_step_numbers(rollout.valid.numpy(), self.lengths.numpy())),
            "observation": _rows(rollout.observation.features),
            "legal": masks[:, exists],
            "actions": choices[:, :heads],
            "numbers": _rows(self.numbers),
            "log_prob": _rows(rollout.log_prob),
            "reward": _rows(rollout.rewards),
            "terminated": _rows(rollout.terminated),
            "truncated": _rows(rollout.truncated),
            "final": final,
        }
        if self.values is not None:
            columns["value"] = _rows(self.values)
        arrays = {
            # Where nothing was done there is nothing to say of it.
            field.name: array_of(columns[field.name], field.type, final & (field.name in DONE))
            for field in schema
            if field.name in columns
        }
        arrays.setdefault("value", pyarrow.nulls(steps * count, pyarrow.float32()))
        return pyarrow.table([arrays[field.name] for field in schema], schema=schema)


def _step_numbers(valid: NDArray[np.bool_], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """The number of each step within its episode, from 1, ``[T, N]``; a final one is the next."""
    numbers = np.zeros(valid.shape, np.int64)
    for t, going in enumerate(valid):
        numbers[t] = lengths + 1
        lengths = np.where(going, numbers[t], 0)
    return numbers


def _rows(x: Any) -> NDArray[Any]:
    """``x [T, N, ...]`` as rows, the steps of each environment together."""
    array = x.cpu().numpy() if isinstance(x, Tensor) else x
    steps, count, *inner = array.shape
    return np.ascontiguousarray(array.swapaxes(0, 1)).reshape(steps * count, *inner)
