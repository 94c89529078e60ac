"""Checks that settings lie in their ranges and can be combined."""

from esper.leyline.config.groups import TrainConfig
from esper.leyline.config.reading import flatten
from esper.leyline.config.setting import check_ranges
from esper.leyline.errors import UsageError


def check(config: TrainConfig) -> None:
    """Refuse values that are out of range or contradict each other.

    Raises:
        UsageError: names the field, its value and the range.
    """
    check_ranges(TrainConfig, flatten(config))
    learner, machine, output = config.learner, config.machine, config.output
    if learner.lr_warmup_steps and learner.lr_warmup_frac:
        raise UsageError("lr_warmup_steps: lr_warmup_frac sets the same length; give one of them")
    if learner.lr_adaptive_kl is not None and learner.lr_decay != "none":
        raise UsageError("lr_adaptive_kl: it sets the learning rate itself; leave lr_decay out")
    if output.record_last is not None and not output.record:
        raise UsageError("record_last: nothing is recorded; give --record too, or leave it out")
    if config.impala.c_clip > config.impala.rho_clip:
        raise UsageError(
            f"c_clip: must be at most rho_clip, {config.impala.rho_clip}, "
            f"got {config.impala.c_clip}"
        )
    if machine.experimental_gpu_preload_gather and machine.gpu_preload is False:
        raise UsageError(
            "experimental_gpu_preload_gather: needs data on the device; leave out --no-gpu-preload"
        )
    if config.gymnasium.gym is not None and len(machine.devices) > 1:
        raise UsageError("devices: a Gymnasium task takes one device; give it with --device")
