"""MNIST-1D: ten classes of short sequences, generated on this machine by the package mnist1d.

Greydanus and Kobak, "Scaling down deep learning with MNIST-1D", ICML 2024. Their table of test
accuracies of trained networks: logistic regression 32 %, MLP 68 %, GRU 91 %, CNN 94 %.
"""

import random
from functools import cache

import numpy as np
import torch

from esper.leyline.errors import UsageError
from esper.runtime.data import Dataset

CLASSES, LENGTH = 10, 40
TRAINING, VALIDATION = 3_500, 500


@cache
def mnist1d(
    correlated_noise: float = 0.25,
    shear: float = 0.75,
    translation: int = 48,
    labels: int = TRAINING,
    shuffled: bool = False,
    seed: int = 0,
) -> Dataset:
    """5,000 sequences as images ``[n, 40, 1, 1]``; the defaults are those of the paper.

    The test split is that of the package. The validation split is drawn from the rest with
    ``seed``, and the training split keeps the first ``labels`` of what remains.

    Args:
        correlated_noise: standard deviation of the smooth noise beside the pattern.
        shear: greatest slope added to a sequence.
        translation: greatest shift of the pattern, in samples of 72 per sequence.
        labels: number of training sequences.
        shuffled: whether the samples of every sequence are permuted, always in the same way.
        seed: seed of the split.

    Raises:
        UsageError: the package mnist1d is not installed.
        ValueError: ``labels`` is out of range.
    """
    if not 1 <= labels <= TRAINING:
        raise ValueError(f"labels must lie in [1, {TRAINING}], got {labels}")
    splits = _generate(correlated_noise, shear, translation, shuffled)
    (images, test_images), (targets, test_targets) = splits
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(images)))
    validation, train = order[:VALIDATION], order[VALIDATION : VALIDATION + labels]
    return Dataset(
        images[train],
        targets[train],
        images[validation],
        targets[validation],
        test_images,
        test_targets,
        classes=CLASSES,
    )


Pair = tuple[torch.Tensor, torch.Tensor]


@cache
def _generate(noise: float, shear: float, translation: int, shuffle: bool) -> tuple[Pair, Pair]:
    """Inputs and labels, each of the training and the test part of the package."""
    try:
        from mnist1d.data import get_dataset_args, make_dataset
    except ImportError as error:
        raise UsageError(
            "data: MNIST-1D needs the package mnist1d; run pip install 'esper-growth[mnist1d]'"
        ) from error
    settings = get_dataset_args()
    settings.corr_noise_scale, settings.shear_scale = noise, shear
    settings.max_translation, settings.shuffle_seq = translation, shuffle
    # The package seeds the global generators, which belong to the user.
    states = random.getstate(), np.random.get_state()
    try:
        data = make_dataset(settings)
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])

    def images(name: str) -> torch.Tensor:
        return torch.from_numpy(data[name].astype(np.float32)).view(-1, LENGTH, 1, 1)

    def labels(name: str) -> torch.Tensor:
        return torch.from_numpy(data[name].astype(np.int64))

    return (images("x"), images("x_test")), (labels("y"), labels("y_test"))
