"""Settings of every kind of run: read from a flat dictionary or file, checked, and flattened."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from esper.leyline.actions import HEADS
from esper.leyline.config import former
from esper.leyline.config.algorithm import algorithms, owner_of
from esper.leyline.config.groups import TrainConfig
from esper.leyline.config.setting import (
    Run,
    about,
    assignments,
    check_name,
    check_ranges,
    settings_of,
    shown,
    typed,
)
from esper.leyline.errors import UsageError, suggestion


def run_settings() -> dict[str, dataclasses.Field[Any]]:
    """All settings of runs by name: the common ones, then those of single algorithms."""
    kinds: list[type] = [TrainConfig, *(one.group for one in algorithms().values())]
    return {name: f for kind in kinds for name, f in settings_of(kind).items()}


def defaults_of(*kinds: Run) -> TrainConfig:
    """The default configuration of a run; where kinds differ, the last one counts.

    A kind is one of ``Run``, or the name of an algorithm.
    """
    defaults = {name: about(f).defaults for name, f in settings_of(TrainConfig).items()}
    config = TrainConfig()
    for run in kinds:
        values = {name: defaults[name][run] for name in defaults if run in defaults[name]}
        if run in algorithms():
            values |= {"algorithm": run, **algorithms()[run].defaults}
        config = _with(config, values)
    return config


def flatten(config: TrainConfig) -> dict[str, Any]:
    """The settings that apply to the run as a flat dictionary for JSON, with tuples as lists."""
    flat: dict[str, Any] = {}
    for group in dataclasses.fields(config):
        flat.update(dataclasses.asdict(getattr(config, group.name)))
    kinds, fields = (None, *_kinds(config)), settings_of(TrainConfig)
    return {
        name: list(v) if isinstance(v, tuple) else v
        for name, v in flat.items()
        if name not in fields or about(fields[name]).only in kinds
    }


def unflatten(settings: dict[str, Any], base: TrainConfig | None = None) -> TrainConfig:
    """The configuration with ``settings``, a flat dictionary that may use aliases.

    Args:
        settings: the settings that were given.
        base: the configuration that supplies the others; if None, the defaults of the kind of run.

    Raises:
        UsageError: an unknown key, a wrong type, two values for one setting, or a setting of
            another kind of run.
    """
    values = canonical(settings)
    complete = _with(base or TrainConfig(), values)
    kinds, gym = _kinds(complete), complete.gymnasium.gym
    if base is None:
        if values.get("lr_adaptive_kl") is not None:
            values = {"lr_decay": "none"} | values  # it takes the place of the default schedule
        complete = _with(defaults_of(*kinds), values)
    elif (base.gymnasium.gym is None) != (gym is None):
        raise UsageError(
            f"gym: {shown(gym)} would change the kind of run; start a new run with esper train ppo"
        )
    _check_kinds(values, kinds)
    return complete


def _kinds(config: TrainConfig) -> tuple[Run, ...]:
    """The kinds of run that a configuration describes: its world, and its algorithm."""
    world: Run = "growth" if config.gymnasium.gym is None else "gym"
    return world, config.method.algorithm


def canonical(settings: dict[str, Any]) -> dict[str, Any]:
    """``settings`` with aliases replaced by field names and lists by tuples.

    Raises:
        UsageError: an unknown key, a wrong type, or two values for one setting.
    """
    values_by_name: dict[str, Any] = {}
    fields = run_settings()
    names = {word: name for name, f in fields.items() for word in (name, *about(f).aliases)}
    for key, value in former.translate(settings):
        word = key.replace("-", "_")
        if word not in names:
            hint = suggestion(word, names, "esper train ppo --help-all lists all settings")
            raise UsageError(f"{key}: there is no such setting; {hint}")
        name = names[word]
        if name in values_by_name and values_by_name[name] != value:
            raise UsageError(f"{key}: {name} was already given another value; keep one of them")
        values_by_name[name] = value
    values = {name: typed(name, v, fields[name].type) for name, v in values_by_name.items()}
    algorithm = values.get("algorithm", "ppo")
    if algorithm not in algorithms():
        choices = ", ".join(map(repr, algorithms()))
        raise UsageError(f"algorithm: must be one of {choices}, got {shown(algorithm)}")
    return _with_devices(values)


def _with_devices(values: dict[str, Any]) -> dict[str, Any]:
    """``values`` with both ``device`` and ``devices`` if it has one of them."""
    if "devices" in values:
        devices = values["devices"]
        if not devices:
            raise UsageError("devices: no device is given; name one or more, such as cpu or cuda:0")
        if values.get("device", devices[0]) != devices[0]:
            raise UsageError(
                f"device: {shown(values['device'])} and devices {shown(' '.join(devices))} "
                "contradict each other; give one of them"
            )
        return values | {"device": devices[0]}
    return values | {"devices": (values["device"],)} if "device" in values else values


def _with(base: TrainConfig, values: dict[str, Any]) -> TrainConfig:
    groups = {}
    kind = algorithms()[values.get("algorithm", base.method.algorithm)].group
    if type(base.algorithm) is not kind:
        base = dataclasses.replace(base, algorithm=kind())
    for group in dataclasses.fields(TrainConfig):
        part = getattr(base, group.name)
        group_values = {
            f.name: values[f.name] for f in dataclasses.fields(part) if f.name in values
        }
        groups[group.name] = dataclasses.replace(part, **group_values)
    return TrainConfig(**groups)


def _check_kinds(values: dict[str, Any], kinds: tuple[Run, ...]) -> None:
    """Refuse settings of other kinds of run than ``kinds``."""
    fields = settings_of(TrainConfig)
    for name in values:
        owner = owner_of(name)
        if owner is not None and owner.name not in kinds:
            raise UsageError(
                f"{name}: belongs to {owner.title}; train with esper train {owner.name}, or leave "
                "it out"
            )
        only = None if name == "gym" or owner is not None else about(fields[name]).only
        if only is not None and only not in kinds:
            raise UsageError(f"{name}: {_ADVICE[only]}")


_ADVICE: dict[Run, str] = {
    "growth": "belongs to growing networks, not to --gym; leave it out",
    "gym": "belongs to a Gymnasium task; give --gym ID, or leave it out",
}
"""By kind of run: what to do with a setting that another kind was given."""


def with_horizons(config: TrainConfig) -> TrainConfig:
    """The configuration of a new run: schedules without an end of their own end with its rounds."""
    learner, rounds = config.learner, config.world.rounds
    learner = dataclasses.replace(
        learner,
        lr_decay_steps=learner.lr_decay_steps or rounds,
        clip_decay_steps=learner.clip_decay_steps or rounds,
        entropy_decay_steps=learner.entropy_decay_steps or rounds,
    )
    return dataclasses.replace(config, learner=learner)


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
    assignments("entropy_per_head", learner.entropy_per_head, HEADS)
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


def settings_file(path: Path) -> dict[str, Any]:
    """Return the settings of a flat JSON file by name, aliases resolved.

    Raises:
        UsageError: the file cannot be read, or a key is wrong.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
    except OSError as error:
        raise UsageError(f"config_json: cannot read {path} ({error.strerror})") from error
    except UsageError:
        raise
    except (ValueError, RecursionError) as error:
        raise UsageError(f"config_json: {path} is not JSON ({error}); correct it") from error
    if not isinstance(content, dict):
        raise UsageError(f"config_json: {path} must hold one object of settings")
    return canonical(content)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Convert a JSON object to a dictionary; refuse a key that appears twice."""
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        duplicate = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"{duplicate}: appears twice in the settings file; keep one of them")
    return content
