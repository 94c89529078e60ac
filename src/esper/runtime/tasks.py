"""The tasks that come with Esper: what to train on, and what to keep for the test.

``suite`` is for training. ``held_out`` holds variations that no training task shares: a policy that
only knows its suite by heart does badly there. ``cifar`` needs files that do not come with Esper.
"""

from dataclasses import replace

from esper.kasmina.hosts.cnn import CnnHost
from esper.kasmina.hosts.mlp import MlpHost
from esper.kasmina.hosts.transformer import TransformerHost
from esper.runtime import data
from esper.runtime.augmentation import Augmentation
from esper.runtime.cifar import cifar10
from esper.runtime.registry import SUITES, TASKS, Drift, Task, agree, find, find_all, task
from esper.runtime.text import SHIPPED, text

__all__ = ["SUITES", "TASKS", "Drift", "Task", "agree", "find", "find_all", "task"]

SUITES["suite"] = (
    "digits_shift",
    "digits",
    "digits_shift_small",
    "digits_noisy",
    "digits_few_labels",
    "digits_drift",
    "digits_mlp",
)
SUITES["held_out"] = (
    "digits_shift_far",
    "digits_shift_near",
    "digits_noisier",
    "digits_clear",
    "digits_five",
    "digits_turned",
    "digits_narrow",
    "digits_wide",
    "digits_deep",
    "digits_long",
)
SUITES["cifar"] = ("cifar_baseline", "cifar_impaired", "cifar_minimal", "cifar_scale")


def _host(*channels: int, classes: int = 10) -> CnnHost:
    return CnnHost(channels, classes, image=(8, 8, 1))


@task
def digits_shift() -> Task:
    """Digits anywhere within two pixels: a host too small for it, where growing pays."""
    return Task(
        name="digits_shift",
        summary="digits shifted by up to 2 pixels, noise 0.1",
        host=_host(4, 8),
        data=lambda: data.digits(shift=2, noise=0.1),
    )


@task
def digits() -> Task:
    """Digits as they are: an ample host that learns fast, where nothing is worth its rent."""
    host = replace(_host(8, 16), pools=2, slot_names=("r0c1", "r1c1"))
    return Task(
        name="digits",
        summary="digits as they are",
        host=host,
        data=data.digits,
        learning_rate=2e-2,
    )


@task
def digits_shift_small() -> Task:
    """Less to cope with than in digits_shift."""
    return Task(
        name="digits_shift_small",
        summary="digits shifted by up to 1 pixel, noise 0.1",
        host=_host(4, 8),
        data=lambda: data.digits(shift=1, noise=0.1),
    )


@task
def digits_noisy() -> Task:
    """Twice the noise of digits_shift."""
    return Task(
        name="digits_noisy",
        summary="digits shifted by up to 2 pixels, noise 0.2",
        host=_host(4, 8),
        data=lambda: data.digits(shift=2, noise=0.2),
    )


@task
def digits_few_labels() -> Task:
    """What is grown here can also learn its few images by heart."""
    return Task(
        name="digits_few_labels",
        summary="as digits_shift with 30 % of the training images",
        host=_host(4, 8),
        data=lambda: data.digits(shift=2, noise=0.1, label_fraction=0.3),
    )


@task
def digits_drift() -> Task:
    """Nobody knows at the start whether growing will pay: the shifts come later, or not at all."""
    return Task(
        name="digits_drift",
        summary="digits with noise 0.1 that begin to be shifted by up to 2 pixels",
        host=_host(4, 8),
        data=lambda: data.digits(noise=0.1),
        drift=Drift(lambda: data.digits(shift=2, noise=0.1), earliest=0.1, latest=0.6, never=1 / 3),
    )


@task
def digits_mlp() -> Task:
    """Digits anywhere within a pixel, for a host without convolutions."""
    return Task(
        name="digits_mlp",
        summary="digits shifted by up to 1 pixel, noise 0.1",
        host=MlpHost(widths=(16, 16), classes=10, image=(8, 8, 1)),
        data=lambda: data.digits(shift=1, noise=0.1),
    )


@task
def digits_shift_far() -> Task:
    """Held out: a larger shift than any in training."""
    return Task(
        name="digits_shift_far",
        summary="digits shifted by up to 3 pixels, noise 0.1",
        host=_host(4, 8),
        data=lambda: data.digits(shift=3, noise=0.1),
    )


@task
def digits_shift_near() -> Task:
    """Held out: shift and noise that training knows, but not together."""
    return Task(
        name="digits_shift_near",
        summary="digits shifted by up to 1 pixel, noise 0.2",
        host=_host(4, 8),
        data=lambda: data.digits(shift=1, noise=0.2),
    )


@task
def digits_noisier() -> Task:
    """Held out: more noise than any in training."""
    return Task(
        name="digits_noisier",
        summary="digits shifted by up to 2 pixels, noise 0.3",
        host=_host(4, 8),
        data=lambda: data.digits(shift=2, noise=0.3),
    )


@task
def digits_clear() -> Task:
    """Held out: shifts with less noise than any in training."""
    return Task(
        name="digits_clear",
        summary="digits shifted by up to 2 pixels, noise 0.05",
        host=_host(4, 8),
        data=lambda: data.digits(shift=2, noise=0.05),
    )


@task
def digits_five() -> Task:
    """Held out: fewer classes, so chance is 20 % instead of 10 %."""
    return Task(
        name="digits_five",
        summary="digits 0 to 4 shifted by up to 2 pixels, noise 0.1",
        host=_host(4, 8, classes=5),
        data=lambda: data.digits(shift=2, noise=0.1, classes=5),
    )


@task
def digits_turned() -> Task:
    """Held out: another kind of transformation."""
    return Task(
        name="digits_turned",
        summary="digits turned by 0 to 3 quarter turns, noise 0.1",
        host=_host(4, 8),
        data=lambda: data.digits(noise=0.1, rotation=3),
    )


@task
def digits_narrow() -> Task:
    """Held out: a host of half the width."""
    return Task(
        name="digits_narrow",
        summary="as digits_shift",
        host=_host(2, 4),
        data=lambda: data.digits(shift=2, noise=0.1),
    )


@task
def digits_wide() -> Task:
    """Held out: a host of twice the width, on data that is hard for it."""
    return Task(
        name="digits_wide",
        summary="as digits_shift",
        host=_host(8, 16),
        data=lambda: data.digits(shift=2, noise=0.1),
    )


@task
def digits_deep() -> Task:
    """Held out: a host with one more block, and so with one more slot."""
    return Task(
        name="digits_deep",
        summary="as digits_shift",
        host=_host(4, 8, 8),
        data=lambda: data.digits(shift=2, noise=0.1),
    )


@task
def digits_long() -> Task:
    """Held out: half as much time again."""
    return Task(
        name="digits_long",
        summary="as digits_shift",
        host=_host(4, 8),
        data=lambda: data.digits(shift=2, noise=0.1),
        episode_length=60,
    )


def _cifar(name: str, host: CnnHost) -> Task:
    return Task(
        name=name,
        summary="CIFAR-10, random crops and flips",
        host=host,
        data=data.FromDirectory(cifar10),
        episode_length=75,
        max_batches=50,
        batch_size=128,
        learning_rate=1e-2,
        augmentation=Augmentation(reach=4, flip=True),
    )


def _cifar_host(*channels: int, kernel: int, pools: int) -> CnnHost:
    return CnnHost(channels, classes=10, image=(32, 32, 3), kernel=kernel, pools=pools)


@task
def cifar_baseline() -> Task:
    """A small host that learns by itself, with room to grow."""
    return _cifar("cifar_baseline", _cifar_host(8, 16, 32, kernel=3, pools=3))


@task
def cifar_impaired() -> Task:
    """A host that sees no neighbourhoods and has a channel or two: nearly all must be grown."""
    return _cifar("cifar_impaired", _cifar_host(1, 2, 4, kernel=1, pools=3))


@task
def cifar_minimal() -> Task:
    """Colours alone: neither neighbourhoods nor pools."""
    return _cifar("cifar_minimal", _cifar_host(2, 4, 8, kernel=1, pools=0))


@task
def cifar_scale() -> Task:
    """Ten slots in five blocks: where to grow is the question."""
    return _cifar("cifar_scale", _cifar_host(8, 16, 32, 64, 128, kernel=3, pools=5))


def _text(name: str, heads: int) -> Task:
    host = TransformerHost(layers=2, width=32, heads=heads, context=16)
    return Task(
        name=name,
        summary="next byte of Esper's licence and documentation",
        host=host,
        data=lambda: text(SHIPPED, host.context),
        max_batches=16,
        batch_size=16,
        learning_rate=3e-3,
    )


@task
def text_bytes() -> Task:
    """A GPT whose layers came without attention: it knows one byte of the past until it grows."""
    return _text("text_bytes", heads=0)


@task
def text_gpt() -> Task:
    """A whole GPT, which needs longer than an episode to need more than it has."""
    return _text("text_gpt", heads=2)
