"""The names of settings, and their other spellings."""

import dataclasses
from difflib import get_close_matches
from typing import Any

from esper.leyline.config.groups import TrainConfig
from esper.leyline.errors import UsageError

ALIASES: dict[str, tuple[str, ...]] = {
    "rounds": ("episodes", "n_episodes"),
    "envs": ("n_envs",),
    "episode_length": ("max_epochs",),
    "use_amp": ("amp",),
    "learning_rate": ("lr",),
    "entropy": ("entropy_coef",),
    "clip": ("clip_ratio",),
    "trace_decay": ("gae_lambda",),
    "discount": ("gamma",),
    "lstm_hidden": ("lstm_hidden_dim",),
    "ppo_epochs": ("recurrent_n_epochs",),
    "reward": ("reward_mode",),
}
"""Other spellings of a field, in the command line and in JSON."""


def setting_names() -> list[str]:
    """Every setting, aliases not included."""
    return list(setting_kinds())


def setting_kinds() -> dict[str, Any]:
    """The type of every setting, by name."""
    groups: list[Any] = [group.type for group in dataclasses.fields(TrainConfig)]
    return {f.name: f.type for group in groups for f in dataclasses.fields(group)}


def canonical_name(key: str) -> str:
    """The setting that ``key`` names.

    Raises:
        UsageError: there is no such setting; suggests the nearest.
    """
    name = key.replace("-", "_")
    names = setting_names()
    if name in names:
        return name
    for original, others in ALIASES.items():
        if name in others:
            return original
    known = names + [alias for others in ALIASES.values() for alias in others]
    near = get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]!r}?" if near else "esper train ppo --help lists all settings"
    raise UsageError(f"{key}: there is no such setting; {hint}")
