"""Conversion of settings to and from one flat dictionary, for every kind of run."""

import dataclasses
from typing import Any

from esper.leyline.config import former
from esper.leyline.config.algorithm import algorithms, own_fields, own_spellings, owner_of
from esper.leyline.config.groups import TrainConfig
from esper.leyline.config.setting import Run, about, settings_of, spellings
from esper.leyline.config.values import shown, typed
from esper.leyline.errors import UsageError, suggestion


def run_settings() -> dict[str, dataclasses.Field[Any]]:
    """All settings of runs by name: the common ones, then those of single algorithms."""
    return {**settings_of(TrainConfig), **own_fields()}


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
    fields, names = run_settings(), spellings(TrainConfig) | own_spellings()
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
