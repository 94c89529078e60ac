"""Random crops and flips of training images, drawn anew for each minibatch."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Augmentation:
    """Pads each image with ``reach`` pixels of 0 on every side and crops it to its original size.

    A pose is one number that encodes the position of the crop and whether it is mirrored:
    ``(flipped * span + down) * span + right`` with ``span = 2 reach + 1``.

    Attributes:
        reach: largest shift in each direction, in pixels.
        flip: whether to mirror images left to right, with probability 0.5.
    """

    reach: int = 0
    flip: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.reach <= 1024:
            raise ValueError(f"reach must lie in [0, 1024], got {self.reach}")

    @property
    def span(self) -> int:
        """Number of positions of a crop along one axis."""
        return 2 * self.reach + 1

    @property
    def poses(self) -> int:
        """Number of poses, which are equally likely."""
        return self.span**2 * (2 if self.flip else 1)

    # Native twin: hosts/worker.h, gather_posed.
    def apply(self, images: Tensor, poses: Tensor) -> Tensor:
        """Crop and flip ``images [n, H, W, C]`` to ``poses``, int64 ``[n]`` on the same device."""
        count, height, width, _ = images.shape
        rows = torch.arange(height, device=images.device)
        columns = torch.arange(width, device=images.device).expand(count, -1)
        mirror = (poses // self.span**2)[:, None] > 0
        y = rows + (poses // self.span % self.span - self.reach)[:, None]
        x = torch.where(mirror, width - 1 - columns, columns)
        x = x + (poses % self.span - self.reach)[:, None]
        inside = _inside(y, height)[:, :, None] & _inside(x, width)[:, None, :]
        image = torch.arange(count, device=images.device)[:, None, None]
        crop = images[image, y.clamp(0, height - 1)[:, :, None], x.clamp(0, width - 1)[:, None, :]]
        return torch.where(inside[..., None], crop, 0.0)


def _inside(position: Tensor, size: int) -> Tensor:
    return (position >= 0) & (position < size)
