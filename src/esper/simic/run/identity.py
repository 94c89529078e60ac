"""What makes two processes parts of one run: its id, settings, plugins, data and switches.

A checkpoint holds the identity of its run, so a run directory whose parts come from elsewhere, or
were edited, is noticed when it is resumed.
"""

from collections.abc import Mapping
from dataclasses import Field
from pathlib import Path
from typing import Any

import msgspec

from esper.leyline.config import TrainConfig, flatten, shown
from esper.leyline.config.reading import run_settings
from esper.leyline.config.setting import about
from esper.leyline.errors import UsageError
from esper.leyline.notices import notice
from esper.leyline.switches import switched_on
from esper.runtime import plugins
from esper.simic.schedules import DISABLE_VARIABLE as DISABLE_LR_SCHEDULE
from esper.tolaria.precision import DISABLE_VARIABLE as DISABLE_AMP

SWITCHES = {
    DISABLE_AMP: "mixed precision is off, whatever the settings say",
    DISABLE_LR_SCHEDULE: "learning rates are constant, whatever the settings say",
}
"""The environment variables that change how a run learns, and what they do."""


class Identity(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The identity of a run.

    Attributes:
        run: the random id in ``config.json``.
        settings: the settings that resuming cannot change, by name.
        switches: the variables of ``SWITCHES`` that are on.
        plugins: SHA-256 of each plugin file.
        data: SHA-256 of the data by name of task or family; empty where it is not known, as for
            Gymnasium tasks and for hosts whose data other processes make.
    """

    run: str = ""
    settings: dict[str, Any] = {}
    switches: list[str] = []
    plugins: list[str] = []
    data: dict[str, str] = {}


def identity_of(run: str, config: TrainConfig, data: dict[str, str]) -> Identity:
    """The identity of the run ``run`` with resolved settings ``config``."""
    return Identity(
        run=run,
        settings=lasting_settings(run_settings(), flatten(config)),
        switches=switches_on(),
        plugins=[plugins.digest(path) for path in config.world.plugin],
        data=_text_digest(config) | data,
    )


def lasting_settings(
    fields: Mapping[str, Field[Any]], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Those of the settings, whose fields are ``fields``, that resuming cannot change."""
    return {name: value for name, value in settings.items() if not about(fields[name]).on_resume}


def switches_on() -> list[str]:
    """The variables of ``SWITCHES`` that are on in this process."""
    return [variable for variable in SWITCHES if switched_on(variable)]


def announce_switches() -> None:
    """Say which switches of the environment are on."""
    for variable in switches_on():
        notice(f"{variable}: {SWITCHES[variable]}")


def check_same_run(run: Path, then: Identity, now: Identity, plugins_given: bool) -> None:
    """Refuse to resume a run whose parts do not belong together.

    Another state of the switches is one warning each.

    Args:
        run: the run directory.
        then: identity in the checkpoint.
        now: identity in ``config.json`` and of this process.
        plugins_given: whether plugins were named for the resume, which replaces those of the run.

    Raises:
        UsageError: names the first part that differs.
    """
    if then.run != now.run:
        raise UsageError(
            f"id: {run / 'config.json'} has {shown(now.run)}, and its checkpoint belongs to the "
            f"run {shown(then.run)}; put back the files of one run"
        )
    for name, value in now.settings.items():
        if name in then.settings and then.settings[name] != value:
            raise UsageError(
                f"{name}: {run / 'config.json'} says {shown(value)}, and the checkpoint was "
                f"trained with {shown(then.settings[name])}; put back the former value"
            )
    if not plugins_given and then.plugins != now.plugins:
        raise UsageError(
            "plugin: a file has changed since the checkpoint was written; put back the former "
            "file, or give --plugin FILE to continue with another one"
        )
    for name, digest in now.data.items():
        if then.data.get(name, digest) != digest:
            field = name if name == _TEXT else "data_dir"
            what = "the file has" if name == _TEXT else f"the data of {name} have"
            raise UsageError(
                f"{field}: {what} changed since the checkpoint was written; put back the former "
                "data, or start a new run with --initial-policy"
            )


def warn_of_switches(then: Identity, now: Identity) -> None:
    """Say which switches of the environment differ from those of the checkpoint."""
    for variable in SWITCHES:
        before, after = (variable in identity.switches for identity in (then, now))
        if before != after:
            state = ("off", "on")
            notice(f"warning: {variable}: {state[before]} until now, {state[after]} from here on")


_TEXT = "text_file"


def _text_digest(config: TrainConfig) -> dict[str, str]:
    path = config.world.text_file
    return {} if path is None else {_TEXT: plugins.digest(path)}
