"""Running moments: exact over all rows so far, constant during a rollout and its update."""

from typing import Protocol

import torch
from torch import Tensor

from esper.tamiyo.policy.interface import ObservationT

_CLIP = 10.0
_ROUNDING = 1e-6
"""Deviation relative to the mean that rounding to float32 may cause."""


class RunningMoments:
    """Mean and variance of every column of all rows given to ``update`` so far.

    Moments of batches are merged in float64 with the exact formula of Chan, Golub and LeVeque
    (1979). Before the first update, the mean is 0.

    Args:
        shape: shape of one row.
        device: device of the moments.
        raw_columns: those that ``normalise`` leaves as they are, bool ``[*shape]``; none if None.
        floor: added to the variance; 0 for quantities in any unit.
        initial: deviation before the first update; infinite ones make ``normalise`` return 0.

    Attributes:
        deviation: ``sqrt(variance + floor)`` of every column, or what rounding may cause if that is
            larger; 1 where a column never changed.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        device: torch.device,
        raw_columns: Tensor | None = None,
        floor: float = 1e-4,
        initial: float = 1.0,
    ):
        self.floor, self.initial = floor, initial
        self.raw_columns = None if raw_columns is None else raw_columns.to(device)
        self.count = torch.zeros((), dtype=torch.float64, device=device)
        self.mean = torch.zeros(shape, dtype=torch.float64, device=device)
        self.squares = torch.zeros(shape, dtype=torch.float64, device=device)
        self.deviation = torch.full(shape, initial, dtype=torch.float64, device=device)

    def update(self, rows: Tensor) -> None:
        """Include ``rows [..., *shape]``; a row with a number that is not finite is ignored.

        Raises:
            ValueError: the rows have another shape.
        """
        if rows.shape[rows.ndim - self.mean.ndim :] != self.mean.shape:
            shape = tuple(self.mean.shape)
            raise ValueError(f"rows of shape {tuple(rows.shape)} do not end in {shape}")
        rows = rows.detach().double().reshape(-1, *self.mean.shape)
        finite = rows.isfinite().reshape(len(rows), -1).all(1)
        count = finite.sum()
        finite = finite.reshape(-1, *[1] * self.mean.ndim)
        mean = torch.where(finite, rows, 0.0).sum(0) / count.clamp(min=1)
        squares = torch.where(finite, rows - mean, 0.0).square().sum(0)
        total = (self.count + count).clamp(min=1.0)
        shift = mean - self.mean
        # In place: a captured rollout step reads these tensors by address.
        self.squares += squares + shift.square() * self.count * count / total
        self.mean += shift * count / total
        self.count += count
        self._find_deviation()

    def _find_deviation(self) -> None:
        variance = self.squares / self.count.clamp(min=1.0)
        deviation = (variance + self.floor).sqrt()
        if not self.floor:
            deviation = torch.maximum(deviation, _ROUNDING * self.mean.abs())
        deviation = torch.where(deviation > 0, deviation, 1.0)
        self.deviation.copy_(torch.where(self.count > 0, deviation, self.initial))

    def normalise(self, x: Tensor) -> Tensor:
        """``(x - mean) / deviation`` clipped to +-10, in float32; ``raw_columns`` unchanged.

        Infinities are not clipped, so that the error they indicate stays visible.
        """
        scores = (x - self.mean) / self.deviation
        values = torch.where(scores.isinf(), scores, scores.clamp(-_CLIP, _CLIP))
        if self.raw_columns is not None:
            values = torch.where(self.raw_columns, x, values)
        return values.float()

    def scale(self, x: Tensor) -> Tensor:
        """``(x - mean) / deviation`` without bounds, in float32."""
        return ((x - self.mean) / self.deviation).float()

    def restore(self, x: Tensor) -> Tensor:
        """The inverse of ``scale``, in float32."""
        return (x * self.deviation + self.mean).float()

    def state(self) -> dict[str, Tensor]:
        """Count, mean and sum of squares, for the checkpoint."""
        return {name: x.clone() for name, x in self._tensors().items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Restore what ``state`` returned.

        Raises:
            ValueError: the moments have another shape.
        """
        if state["mean"].shape != self.mean.shape:
            old_shape, shape = tuple(state["mean"].shape), tuple(self.mean.shape)
            raise ValueError(f"moments of shape {old_shape}, not {shape}")
        for name, tensor in self._tensors().items():
            tensor.copy_(state[name])
        self._find_deviation()

    def _tensors(self) -> dict[str, Tensor]:
        return {"count": self.count, "mean": self.mean, "squares": self.squares}


class ObservationMoments(Protocol[ObservationT]):
    """Running moments of observations, constant between updates."""

    def normalise(self, observation: ObservationT) -> ObservationT:
        """The normalised observation, which the network receives."""
        ...

    def update(self, observation: ObservationT, valid: Tensor | None) -> None:
        """Include the observations of a rollout, ``[T, N]``; only ``valid`` ones if given."""
        ...

    def parts(self) -> dict[str, RunningMoments]:
        """The moments by name, for the checkpoint."""
        ...
