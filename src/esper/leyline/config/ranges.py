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
    check_ranges(TrainConfig, flatten(config))
    check_name(config.output.name)
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
    _check_actors(config)
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


def _check_actors(config: TrainConfig) -> None:
    """Refuse actors that would have no environments, and settings that actors do not have.

    Raises:
        UsageError: names the field, its value and the fix.
    """
    actors, world = config.impala.actors, config.world
    if not actors:
        if config.impala.ray_address is not None:
            raise UsageError("ray_address: there are no actors; give --actors too, or leave it out")
        return
    if len(config.machine.devices) > 1:
        raise UsageError("devices: with actors, hosts run on their CPUs; give one device")
    size = world.group_size if config.gymnasium.gym is None else 1
    groups = -(-world.envs // size)
    if actors > groups:
        what = "environments" if size == 1 else f"groups of {size} environments"
        raise UsageError(
            f"actors: {actors} are more than the {groups} {what}, which stay whole; take fewer "
            "actors or more envs"
        )
