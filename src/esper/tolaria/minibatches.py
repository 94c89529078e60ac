"""The training images of an epoch, fetched minibatch by minibatch."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.runtime.augmentation import Augmentation


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
        images = torch.empty(shape, dtype=self.images.dtype, pin_memory=page_locked)
        torch.index_select(self.images, 0, samples.flatten(), out=images)
        return images.unflatten(0, samples.shape).to(self.drawn.device, non_blocking=True)


def _compact(x: Tensor) -> Tensor:
    """A contiguous copy.

    The copy is made even if ``x`` is contiguous, so that the number of operations does not depend
    on the number of groups.
    """
    return x.clone(memory_format=torch.contiguous_format)
