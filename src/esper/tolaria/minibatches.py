"""The images that hosts train on in an epoch, fetched minibatch by minibatch."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.runtime.augmentation import Augmentation


@dataclass(frozen=True, slots=True)
class Minibatches:
    """The images of an epoch; iterating gives one minibatch after another.

    Attributes:
        images: to draw from, ``[samples, H, W, C]``.
        labels: int64 ``[samples]``, or ``[samples, T]`` of sequences; so elsewhere.
        drawn: which images each group of environments sees, int64 ``[G, batches, B]``.
        group: of each environment, int64 ``[N]``; every one is a group by itself when None.
        augmentation: of the images drawn, none when None.
        poses: of every image drawn, as ``drawn``; with an augmentation.
        streamed: whether ``images`` lie in the memory of the host, from which each minibatch is
            copied to where the rest is, while the one before is computed.
    """

    images: Tensor
    labels: Tensor
    drawn: Tensor
    group: Tensor | None = None
    augmentation: Augmentation | None = None
    poses: Tensor | None = None
    streamed: bool = False

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Images ``[B, H, W, N, C]`` and labels ``[N, B]``."""
        place = self.images.device if self.streamed else self.drawn.device
        wanted = _in_order(self.drawn.transpose(0, 1))
        poses = None if self.poses is None else _in_order(self.poses.transpose(0, 1))
        for batch, samples in enumerate(wanted.to(place)):
            images = self._fetched(samples)
            if self.augmentation is not None and poses is not None:
                flat = self.augmentation.apply(images.flatten(0, 1), poses[batch].flatten())
                images = flat.view_as(images)
            images, labels = _in_order(images.permute(1, 2, 3, 0, 4)), self.labels[wanted[batch]]
            if self.group is None:
                yield images, labels
            else:
                yield images.index_select(3, self.group), labels.index_select(0, self.group)

    def of_rows(self, drawn: Tensor) -> Tensor:
        """``drawn`` or ``poses`` by environment, ``[N, batches, B]``."""
        return drawn if self.group is None else drawn[self.group]

    def _fetched(self, samples: Tensor) -> Tensor:
        """Images by number, int64 ``[G, B]``, where the rest is."""
        if not self.streamed:
            return self.images[samples]
        shape = (samples.numel(), *self.images.shape[1:])
        # Page-locked memory is what a copy can leave while the device computes; torch keeps it
        # until the copy is over.
        page_locked = self.images.is_pinned()
        taken = torch.empty(shape, dtype=self.images.dtype, pin_memory=page_locked)
        torch.index_select(self.images, 0, samples.flatten(), out=taken)
        return taken.unflatten(0, samples.shape).to(self.drawn.device, non_blocking=True)


def _in_order(x: Tensor) -> Tensor:
    """A contiguous copy, made even where there is nothing to move: as many operations for one
    group as for many."""
    return x.clone(memory_format=torch.contiguous_format)
