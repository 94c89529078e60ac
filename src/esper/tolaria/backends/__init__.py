"""Interface of the backends, which train and validate N hosts: what they take and measure."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

# Not ``import torch``: that is also the name of a module of this package.
from torch import Tensor, contiguous_format, empty, index_select

from esper.runtime.data import Augmentation
from esper.tolaria.plan import Seeds, Variant
from esper.tolaria.precision import LossScales
from esper.tolaria.results import EpochResult, Scores
from esper.tolaria.stores import Stack


@dataclass(frozen=True, slots=True)
class Minibatches:
    """The images of an epoch; iterating yields its minibatches.

    Attributes:
        images: images to draw from, ``[samples, H, W, C]``.
        labels: int64 ``[samples]``, for sequences ``[samples, T]``; minibatches likewise.
        drawn: indices of the images that each group of environments sees, int64
            ``[G, batches, B]``.
        group: group of each environment, int64 ``[N]``; None: each environment is its own group.
        augmentation: augmentation of the drawn images, None for none.
        poses: pose of each drawn image, shaped like ``drawn``; set if there is an augmentation.
        streamed: whether ``images`` are in CPU memory; each minibatch is then copied to the
            device while the previous one is computed.
    """

    images: Tensor
    labels: Tensor
    drawn: Tensor
    group: Tensor | None = None
    augmentation: Augmentation | None = None
    poses: Tensor | None = None
    streamed: bool = False

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield images ``[B, H, W, N, C]`` and labels ``[N, B]`` of each minibatch."""
        storage = self.images.device if self.streamed else self.drawn.device
        indices = _compact(self.drawn.transpose(0, 1))
        poses = None if self.poses is None else _compact(self.poses.transpose(0, 1))
        for batch, samples in enumerate(indices.to(storage)):
            images = self._images_of(samples)
            if self.augmentation is not None and poses is not None:
                flat = self.augmentation.apply(images.flatten(0, 1), poses[batch].flatten())
                images = flat.view_as(images)
            images, labels = _compact(images.permute(1, 2, 3, 0, 4)), self.labels[indices[batch]]
            if self.group is None:
                yield images, labels
            else:
                yield images.index_select(3, self.group), labels.index_select(0, self.group)

    def of_rows(self, samples: Tensor) -> Tensor:
        """``samples`` or ``poses`` expanded from groups to environments, ``[N, batches, B]``."""
        return samples if self.group is None else samples[self.group]

    def _images_of(self, samples: Tensor) -> Tensor:
        """The images with indices ``samples``, int64 ``[G, B]``, on the device of ``drawn``."""
        if not self.streamed:
            return self.images[samples]
        shape = (samples.numel(), *self.images.shape[1:])
        # A copy from page-locked memory runs while the device computes; torch keeps the memory
        # alive until the copy has finished.
        page_locked = self.images.is_pinned()
        images = empty(shape, dtype=self.images.dtype, pin_memory=page_locked)
        index_select(self.images, 0, samples.flatten(), out=images)
        return images.unflatten(0, samples.shape).to(self.drawn.device, non_blocking=True)


def _compact(x: Tensor) -> Tensor:
    """A contiguous copy.

    The copy is made even if ``x`` is contiguous, so that the number of operations does not depend
    on the number of groups.
    """
    return x.clone(memory_format=contiguous_format)


__all__ = ["Backend", "HeldBack", "Optimisation", "Variant"]


@dataclass(frozen=True, slots=True)
class Optimisation:
    """How hosts and seeds are updated.

    Attributes:
        host_learning_rate: ``[N]``.
        seed_learning_rate: ``[N, S]``.
        weight_decay: weight decay of the hosts; seeds have none.
        max_gradient_norm: clipping norm, applied to each host and each seed separately.
        momentum: momentum of SGD, which adds weight decay to the gradient; None means AdamW.
        tuning: how each host is tuned, index in ``runtime.tasks.TUNINGS``, int64 ``[N]``; None
            means that all parameters are trained at the same rate.
        scales: loss scales, updated after every minibatch; None means losses are not scaled.
    """

    host_learning_rate: Tensor
    seed_learning_rate: Tensor
    weight_decay: float
    max_gradient_norm: float
    momentum: float | None = None
    scales: LossScales | None = None
    tuning: Tensor | None = None


@dataclass(frozen=True, slots=True)
class HeldBack:
    """Held-back data sets for scoring.

    Attributes:
        images: images of D data sets, ``[D, V, H, W, C]``.
        labels: int64 ``[D, V, *label_shape]``.
        dataset: index of the data set that each row is scored on, int64 ``[R]``.
    """

    images: Tensor
    labels: Tensor
    dataset: Tensor

    def by_row(self) -> tuple[Tensor, Tensor]:
        """Images ``[V, H, W, R, C]`` and labels ``[R, V, *label_shape]``.

        With a single data set the axis R has length 1, and all rows share it.
        """
        if len(self.images) == 1:
            return self.images[0][:, :, :, None], self.labels
        return self.images[self.dataset].permute(1, 2, 3, 0, 4), self.labels[self.dataset]


class Backend(Protocol):
    """Trains and validates N hosts. Results of one environment never depend on another's values.

    Attributes:
        name: name of the backend in messages and in the fingerprint of a run.
        uses_all_threads: whether a call uses all threads itself; otherwise the caller distributes
            environments over threads.
    """

    name: str
    uses_all_threads: bool

    def train_epoch(
        self, stack: Stack, seeds: Seeds, minibatches: Minibatches, optimisation: Optimisation
    ) -> EpochResult:
        """Train every host and every computed seed for one epoch, in place.

        Args:
            stack: parameters and optimizer state.
            seeds: seeds of all N rows.
            minibatches: at least one.
            optimisation: learning rates and clipping.
        """
        ...

    def evaluate(
        self,
        stack: Stack,
        seeds: Seeds,
        held_back: HeldBack,
        variants: list[Variant],
        rows: Tensor | None = None,
    ) -> tuple[Scores, list[Scores]]:
        """Score hosts and variants of them.

        Args:
            stack: parameters.
            seeds: acting seeds of each of the R rows.
            held_back: data to score on.
            variants: hosts to score again; their ``rows`` index the R rows.
            rows: environments to score, int64 ``[R]``; all when None.

        Returns:
            Scores of the hosts ``[R]``, and of each variant ``[M]``.
        """
        ...
