"""Conversion of settings to and from one flat dictionary, for every kind of run."""

import dataclasses
from typing import Any

from esper.leyline.config.former import modern
from esper.leyline.config.groups import TrainConfig
from esper.leyline.config.setting import Run, about, settings_of, spellings
from esper.leyline.config.values import shown, typed
from esper.leyline.errors import UsageError, suggestion


def defaults_of(run: Run) -> TrainConfig:
    """The default configuration of a kind of run."""
    own = {name: about(f).defaults for name, f in settings_of(TrainConfig).items()}
    return _with(TrainConfig(), {name: own[name][run] for name in own if run in own[name]})


def flatten(config: TrainConfig) -> dict[str, Any]:
    """The settings that apply to the run as a flat dictionary for JSON, with tuples as lists."""
    flat: dict[str, Any] = {}
    for group in dataclasses.fields(config):
        flat.update(dataclasses.asdict(getattr(config, group.name)))
    absent = "gym" if config.gymnasium.gym is None else "growth"
    fields = settings_of(TrainConfig)
    return {
        name: list(v) if isinstance(v, tuple) else v
        for name, v in flat.items()
        if about(fields[name]).only != absent
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
    given = canonical(settings)
    if base is None:
        base = TrainConfig()
        if given.get("gym") is not None:
            base = _with(defaults_of("gym"), {"gym": given["gym"]})
    complete = _with(base, given)
    _check_kind(given, base.gymnasium.gym, complete.gymnasium.gym)
    return complete


def canonical(settings: dict[str, Any]) -> dict[str, Any]:
    """``settings`` with aliases replaced by field names and lists by tuples.

    Raises:
        UsageError: an unknown key, a wrong type, or two values for one setting.
    """
    given: dict[str, Any] = {}
    fields, names = settings_of(TrainConfig), spellings(TrainConfig)
    for key, value in modern(settings):
        word = key.replace("-", "_")
        if word not in names:
            hint = suggestion(word, names, "esper train ppo --help lists all settings")
            raise UsageError(f"{key}: there is no such setting; {hint}")
        name = names[word]
        if name in given and given[name] != value:
            raise UsageError(f"{key}: {name} was already given another value; keep one of them")
        given[name] = value
    return _with_devices({name: typed(name, v, fields[name].type) for name, v in given.items()})


def _with_devices(given: dict[str, Any]) -> dict[str, Any]:
    """``given`` with both ``device`` and ``devices`` if it has one of them."""
    if "devices" in given:
        devices = given["devices"]
        if not devices:
            raise UsageError("devices: no device is given; name one or more, such as cpu or cuda:0")
        if given.get("device", devices[0]) != devices[0]:
            raise UsageError(
                f"device: {shown(given['device'])} and devices {shown(' '.join(devices))} "
                "contradict each other; give one of them"
            )
        return given | {"device": devices[0]}
    return given | {"devices": (given["device"],)} if "device" in given else given


def _with(base: TrainConfig, given: dict[str, Any]) -> TrainConfig:
    groups = {}
    for group in dataclasses.fields(TrainConfig):
        part = getattr(base, group.name)
        own = {f.name: given[f.name] for f in dataclasses.fields(part) if f.name in given}
        groups[group.name] = dataclasses.replace(part, **own)
    return TrainConfig(**groups)


def _check_kind(given: dict[str, Any], before: str | None, gym: str | None) -> None:
    """Refuse settings of growing networks for a Gymnasium task, and vice versa."""
    if (before is None) != (gym is None):
        raise UsageError(
            f"gym: {shown(gym)} would change the kind of run; start a new run with esper train ppo"
        )
    fields = settings_of(TrainConfig)
    for name in given:
        only = None if name == "gym" else about(fields[name]).only
        if gym is not None and only == "growth":
            raise UsageError(f"{name}: belongs to growing networks, not to --gym; leave it out")
        if gym is None and only == "gym":
            raise UsageError(f"{name}: belongs to a Gymnasium task; give --gym ID, or leave it out")
