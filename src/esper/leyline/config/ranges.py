"""Checks that settings lie in their ranges and can be combined."""

from esper.leyline.config.groups import TrainConfig
from esper.leyline.config.reading import flatten
from esper.leyline.config.setting import check_name, check_ranges
from esper.leyline.errors import UsageError


def check(config: TrainConfig) -> None:
    """Refuse values that are out of range or contradict each other.

    Raises:
        UsageError: names the field, its value and the range.
    """
    values = flatten(config)
    check_ranges(TrainConfig, values)
    check_ranges(type(config.algorithm), values)
    check_name(config.output.name)
    learner, machine, output = config.learner, config.machine, config.output
    if learner.lr_warmup_steps and learner.lr_warmup_frac:
        raise UsageError("lr_warmup_steps: lr_warmup_frac sets the same length; give one of them")
    if learner.lr_adaptive_kl is not None and learner.lr_decay != "none":
        raise UsageError("lr_adaptive_kl: it sets the learning rate itself; leave lr_decay out")
    if output.record_last is not None and not output.record:
        raise UsageError("record_last: nothing is recorded; give --record too, or leave it out")
    config.algorithm.check(config)
    _check_group_baseline(config)
    if machine.experimental_gpu_preload_gather and machine.gpu_preload is False:
        raise UsageError(
            "experimental_gpu_preload_gather: needs data on the device; leave out --no-gpu-preload"
        )
    if config.gymnasium.gym is not None and len(machine.devices) > 1:
        raise UsageError("devices: a Gymnasium task takes one device; give it with --device")


def _check_group_baseline(config: TrainConfig) -> None:
    """Refuse the baseline of a group where an environment would have no others in its group.

    Raises:
        UsageError: names the field and the fix.
    """
    envs, size = config.world.envs, config.world.group_size
    if config.learner.group_baseline and (size < 2 or envs % size):
        raise UsageError(
            f"group_baseline: needs whole groups of at least two environments, not {envs} "
            f"environments in groups of {size}; change --envs or --group-size"
        )
