"""Minibatches with crops and flips: by hand, in both backends, and streamed from CPU memory."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch

from esper.runtime.data import Augmentation
from esper.tolaria.backends.native import NativeBackend
from esper.tolaria.backends.torch import TorchBackend
from esper.tolaria.bank import DataBank
from esper.tolaria.engine import Engine, Rows
from esper.tolaria.precision import Precision
from support import (
    CPU,
    F64,
    mixed_gardens,
    needs_native,
    seed_state,
    small_gpt,
    small_host,
    small_task,
)

MOVED = Augmentation(reach=2, flip=True)
GROUPS = torch.tensor([7, 7, 9, 9, 9])


def engine(
    backend: str = "torch",
    augmentation: Augmentation | None = MOVED,
    preload: bool = True,
    image: tuple[int, int, int] = (6, 6, 2),
):
    task = replace(small_task(small_host(image=image)), augmentation=augmentation)
    chosen = (
        NativeBackend(task.host, F64)
        if backend == "native"
        else TorchBackend(task.host, Precision("cpu"))
    )
    bank = DataBank([(task, task.datasets())], F64, CPU, preload)
    made = Engine(bank, Rows(torch.arange(5), GROUPS), 3, chosen, max_batches=3, batch_size=6)
    made.reset(0)
    return made


def moved_by_hand(image: np.ndarray, pose: int, reach: int) -> np.ndarray:
    """Pad, crop and mirror with the corresponding functions of numpy."""
    span = 2 * reach + 1
    flipped, down, right = pose // span**2, pose // span % span, pose % span
    padded = np.pad(image, ((reach, reach), (reach, reach), (0, 0)))
    crop = padded[down : down + image.shape[0], right : right + image.shape[1]]
    return crop[:, ::-1] if flipped else crop


@pytest.mark.parametrize("augmentation", [MOVED, Augmentation(reach=1), Augmentation(flip=True)])
def test_every_pose_matches_pad_crop_and_mirror(augmentation: Augmentation) -> None:
    images = torch.randn(augmentation.poses, 5, 4, 2, dtype=F64)
    found = augmentation.apply(images, torch.arange(augmentation.poses))
    for pose, (image, moved) in enumerate(zip(images, found, strict=True)):
        by_hand = moved_by_hand(image.numpy(), pose, augmentation.reach)
        np.testing.assert_array_equal(moved.numpy(), by_hand)


def test_every_step_and_every_episode_draws_its_own_minibatches() -> None:
    made = engine()

    def drawn(episode: int, step: int) -> torch.Tensor:
        made.reset(episode)
        return made.minibatches(step).drawn.clone()

    found = [drawn(episode, step) for episode in (0, 1) for step in (0, 1)]
    assert not any(torch.equal(one, other) for one, other in combinations(found, 2))
    assert torch.equal(drawn(0, 0), found[0])
    assert not torch.equal(found[0][0], found[0][1]), "groups draw by themselves"


def test_poses_do_not_change_which_images_are_drawn() -> None:
    posed, plain = engine().minibatches(4), engine(augmentation=None).minibatches(4)
    assert torch.equal(posed.drawn, plain.drawn)
    assert plain.poses is None
    assert posed.poses is not None
    assert posed.poses.shape == (2, 3, 6)
    assert 0 <= int(posed.poses.min()) <= int(posed.poses.max()) < MOVED.poses == 50
    assert len(posed.poses.unique()) > 15
    assert not torch.equal(posed.poses[0], posed.poses[1]), "groups draw by themselves"


def test_rows_of_a_group_see_the_same_augmented_images() -> None:
    batches = engine().minibatches(1)
    assert batches.poses is not None
    for number, (images, labels) in enumerate(batches):
        assert images.shape == (6, 6, 6, 5, 2)
        for row, group in enumerate([0, 0, 1, 1, 1]):
            drawn, poses = batches.drawn[group, number], batches.poses[group, number]
            assert torch.equal(labels[row], batches.labels[drawn])
            for i in range(6):
                image = batches.images[drawn[i]].numpy()
                by_hand = moved_by_hand(image, int(poses[i]), MOVED.reach)
                np.testing.assert_array_equal(images[i, :, :, row].numpy(), by_hand)


@needs_native
@pytest.mark.parametrize("image", [(6, 6, 2), (5, 7, 3)])
def test_both_backends_train_on_the_same_augmented_images(image: tuple[int, int, int]) -> None:
    found = {}
    for augmentation in (MOVED, None):
        for backend in ("torch", "native"):
            made = engine(backend, augmentation, image=image)
            state = seed_state(mixed_gardens(3, 5)[0], 3)
            made.germinate(state.living, state.blueprint, 0)
            result = made.train(state, 0)
            found[augmentation, backend] = (result.loss, made.stack.host)
    for part in range(2):
        torch.testing.assert_close(
            found[MOVED, "native"][part], found[MOVED, "torch"][part], rtol=1e-9, atol=1e-9
        )
    assert not torch.allclose(found[MOVED, "torch"][0], found[None, "torch"][0])


@pytest.mark.parametrize("augmentation", [MOVED, None])
def test_streamed_minibatches_match_preloaded_data(augmentation: Augmentation | None) -> None:
    near, far = (engine(augmentation=augmentation, preload=p).minibatches(2) for p in (True, False))
    assert far.streamed
    assert not near.streamed
    for (images, labels), (other, others) in zip(near, far, strict=True):
        assert torch.equal(images, other)
        assert torch.equal(labels, others)


def test_streamed_sequence_windows_match_preloaded_data() -> None:
    host = small_gpt()
    stream = torch.randint(host.classes, (300,)).to(F64)
    windows = stream[:-1].unfold(0, host.context, 1)[:, None, :, None]
    following = stream[1:].long().unfold(0, host.context, 1)
    task = small_task(host)
    data = replace(task.datasets()[0], train_images=windows, train_labels=following)
    found = []
    for preload in (True, False):
        bank = DataBank([(task, [data])], F64, CPU, preload)
        backend = TorchBackend(host, Precision("cpu"))
        made = Engine(bank, Rows(torch.arange(5), GROUPS), 3, backend, max_batches=3, batch_size=6)
        made.reset(0)
        found.append(list(made.minibatches(2)))
    for (images, labels), (other, others) in zip(*found, strict=True):
        assert labels.shape == (5, 6, host.context)
        assert torch.equal(images[:, 0, 1:, :, 0].permute(2, 0, 1).long(), labels[..., :-1])
        assert torch.equal(images, other)
        assert torch.equal(labels, others)


def test_small_data_are_preloaded_by_default() -> None:
    assert not engine(preload=None).bank.streamed  # type: ignore[arg-type]
