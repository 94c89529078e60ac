"""Fields of a ``config.json`` of the prior system that are neither settings nor aliases here.

Every field is taken: as settings of Esper, of which one line says what was made of it, or with one
line that says why it changes nothing. ``docs/from-esper-lite.md`` is written from ``FIELDS``.
"""

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from esper.leyline.config.setting import shown
from esper.leyline.errors import UsageError

log = logging.getLogger(__name__)

ENVS, ENTROPY, VALUE_WEIGHT = 4, 0.05, 0.5
"""Defaults of the prior system, for fields that are computed from others."""

OPTIONS: dict[str, tuple[str, float]] = {
    "param_budget": ("parameter_budget", 500_000.0),
    "param_penalty_weight": ("parameter_penalty", 0.1),
    "sparse_reward_scale": ("sparse_scale", 1.0),
    "basic_acc_delta_weight": ("accuracy_weight", 5.0),
    "rent_host_params_floor": ("rent_floor", 0.0),
}
"""Fields that are a number of ``reward_options``, with the default there."""
SWITCHED_OFF = {
    "disable_pbrs": "shaping",
    "disable_terminal_reward": "terminal",
    "disable_anti_gaming": "anti_gaming",
}
"""Fields that set such a number to 0."""
GATES = {f"auto_forward_g{number}": f"g{number}" for number in (1, 2, 3)}
WITHOUT_EFFECT = {
    "gradient_telemetry_stride": "telemetry_level sets how much is written",
    "plateau_threshold": "it steered messages alone; `esper report` says whether a run learns",
    "improvement_threshold": "it steered messages alone; `esper report` says whether a run learns",
    "chunk_length": "policies learn from whole episodes",
}
"""Fields that change nothing, and why."""
LOSS_MODE = "loss_change"
FAMILIES = "contribution", LOSS_MODE.removesuffix("_change")
ENTROPY_FIELDS = (
    *("entropy_coef_start", "entropy_coef_end", "entropy_coef_min"),
    *("entropy_anneal_episodes", "entropy_anneal_rounds"),
)

FIELDS: dict[str, str] = {
    **{name: f"`reward_options`, {option}=" for name, (option, _) in OPTIONS.items()},
    **{name: f"`reward_options`, {option}=0" for name, option in SWITCHED_OFF.items()},
    **{name: f"`auto_advance`, {gate}" for name, gate in GATES.items()},
    **{name: f"changes nothing: {why}" for name, why in WITHOUT_EFFECT.items()},
    **dict.fromkeys(
        ENTROPY_FIELDS,
        "`entropy`, `entropy_decay` linear, `entropy_decay_steps` (episodes over environments, up "
        "to where the minimum is reached), `entropy_end_factor`; nothing without an annealing",
    ),
    "entropy_coef_per_head": "`entropy_per_head`, NAME=FACTOR for each head",
    "value_warmup_batches": "`value_warmup_steps`",
    "value_coef_start": "`value_start_factor`, divided by value_coef",
    "max_grad_norm": "`host_gradient_norm`; `max_gradient_norm` is the policy's",
    "ppo_updates_per_batch": "`ppo_epochs`, multiplied by recurrent_n_epochs",
    "reward_family": "contribution: nothing; loss: `reward` loss_change",
    "use_telemetry": "`telemetry_level` off if it is false",
    "permissive_gates": "`strict_gates`, its opposite",
}
"""What becomes of each field."""

ALIASES = (
    *("n_episodes", "n_envs", "max_epochs", "batch_size_per_env", "lr", "clip_ratio", "gamma"),
    *("gae_lambda", "recurrent_n_epochs", "entropy_coef", "value_coef", "lstm_hidden_dim", "amp"),
    *("amp_dtype", "compile_mode", "slots", "max_seeds", "seed", "task", "reward_mode"),
)
"""Fields that are settings here, under the same or another name."""

_DTYPES = {"fp16": "float16", "bf16": "bfloat16"}


def translate(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The items of ``settings``, with fields of the prior system replaced or left out.

    Raises:
        UsageError: the value of a field has another type than in the prior system.
    """
    former = _Former({key.replace("-", "_"): value for key, value in settings.items()})
    duplicates = former.duplicates()
    for key, value in settings.items():
        name = key.replace("-", "_")
        if name in FIELDS or name in duplicates or (name == "task" and value is None):
            continue
        if name == "amp_dtype" and isinstance(value, str) and value in _DTYPES:
            yield key, _DTYPES[value]
        elif name in ("reward", "reward_mode") and value == "minimal":
            log.info("reward_mode: minimal is sparse here: a seed cannot be pruned young")
            yield key, "sparse"
        else:
            yield key, value
    yield from former.settings.items()


class _Former:
    """The settings of Esper that fields of the prior system become.

    Args:
        fields: all settings of the file by name.

    Attributes:
        settings: what becomes of them.
    """

    def __init__(self, fields: Mapping[str, Any]):
        self.fields = fields
        self.settings: dict[str, Any] = {}
        self._entropy()
        self._entropy_per_head()
        self._value()
        self._rewards()
        self._switches()

    def duplicates(self) -> set[str]:
        """Names of settings in the file that fields of the prior system set as well."""
        aliases = {
            "entropy": ("entropy", "entropy_coef"),
            "reward": ("reward", "reward_mode"),
            "ppo_epochs": ("ppo_epochs", "recurrent_n_epochs"),
        }
        return {alias for name in self.settings for alias in aliases.get(name, ())}

    def _put(self, fields: Iterable[str], **settings: Any) -> None:
        """Take over the settings that ``fields`` become, and say so in one line."""
        self.settings |= settings
        text = ", ".join(f"{field} {shown(self.fields[field])}" for field in fields)
        texts = {n: " ".join(v) if isinstance(v, tuple) else v for n, v in settings.items()}
        log.info("%s: here %s", text, ", ".join(f"{n} {text}" for n, text in texts.items()))

    def _pass_over(self, name: str, why: str) -> None:
        """Say in one line that a field changes nothing."""
        log.info("%s: %s changes nothing: %s", name, shown(self.fields[name]), why)

    def _number(self, name: str, default: float, *alternatives: str) -> float:
        """The number given for a field, or for one of ``alternatives``."""
        for field in (name, *alternatives):
            value = self.fields.get(field)
            if value is None:
                continue
            if type(value) not in (int, float) or not 0.0 <= value <= 1e12:
                raise UsageError(f"{field}: must be a number from 0 to 1e12, got {shown(value)}")
            return float(value)
        return default

    def _flag(self, name: str) -> bool:
        value = self.fields.get(name, False)
        if not isinstance(value, bool):
            raise UsageError(f"{name}: must be true or false, got {shown(value)}")
        return value

    def _entropy(self) -> None:
        fields = [name for name in ENTROPY_FIELDS if self._number(name, math.nan) >= 0.0]
        episodes = self._number("entropy_anneal_episodes", 0.0, "entropy_anneal_rounds")
        if episodes:
            self._anneal(episodes, fields)
        else:
            for name in fields:
                if not name.startswith("entropy_anneal"):
                    self._pass_over(name, "there is no annealing of the entropy")

    def _anneal(self, episodes: float, fields: list[str]) -> None:
        weight = self._number("entropy_coef", ENTROPY, "entropy")
        start, end = (self._number(f"entropy_coef_{part}", weight) for part in ("start", "end"))
        least = self._number("entropy_coef_min", 0.01)
        rounds = math.ceil(episodes / max(1.0, self._number("n_envs", ENVS, "envs")))
        if end < least < start:
            # The line to ``end`` is left where it reaches the minimum.
            rounds = max(1, round(rounds * (start - least) / (start - end)))
        start, end = max(start, least), max(end, least)
        self._put(
            fields,
            entropy=start,
            entropy_decay="linear",
            entropy_decay_steps=rounds,
            entropy_end_factor=end / start if start else 1.0,
        )

    def _entropy_per_head(self) -> None:
        per_head = self.fields.get("entropy_coef_per_head")
        if per_head is not None:
            if not isinstance(per_head, dict):
                raise UsageError(
                    f"entropy_coef_per_head: must be an object of numbers, got {shown(per_head)}"
                )
            texts = tuple(f"{head}={factor}" for head, factor in per_head.items())
            self._put(["entropy_coef_per_head"], entropy_per_head=texts)

    def _value(self) -> None:
        batches = int(self._number("value_warmup_batches", 0.0))
        if batches:
            self._put(["value_warmup_batches"], value_warmup_steps=batches)
        if batches and self.fields.get("value_coef_start") is not None:
            weight = self._number("value_coef", VALUE_WEIGHT, "value_weight")
            factor = self._number("value_coef_start", 0.0) / weight if weight else 1.0
            self._put(["value_coef_start"], value_start_factor=factor)

    def _rewards(self) -> None:
        numbers = {
            name: (option, self._number(name, default))
            for name, (option, default) in OPTIONS.items()
            if self._number(name, default) != default
        }
        numbers |= {
            name: (option, 0.0) for name, option in SWITCHED_OFF.items() if self._flag(name)
        }
        if numbers:
            texts = tuple(f"{option}={number:g}" for option, number in numbers.values())
            self._put(numbers, reward_options=texts)
        family = self.fields.get("reward_family", "contribution")
        if family not in FAMILIES:
            raise UsageError(f"reward_family: must be contribution or loss, got {shown(family)}")
        if family == FAMILIES[1]:
            self._put(["reward_family"], reward=LOSS_MODE)

    def _switches(self) -> None:
        gates = [name for name in GATES if self._flag(name)]
        if gates:
            self._put(gates, auto_advance=tuple(GATES[name] for name in gates))
        if self.fields.get("max_grad_norm") is not None:
            norm = self._number("max_grad_norm", 1.0)
            self._put(["max_grad_norm"], host_gradient_norm=norm)
        updates = int(self._number("ppo_updates_per_batch", 1.0))
        if updates > 1:
            passes = updates * int(self._number("recurrent_n_epochs", 1.0, "ppo_epochs"))
            self._put(["ppo_updates_per_batch"], ppo_epochs=passes)
        if "use_telemetry" in self.fields and not self._flag("use_telemetry"):
            self._put(["use_telemetry"], telemetry_level="off")
        if "permissive_gates" in self.fields:
            strict = not self._flag("permissive_gates")
            if strict:
                self._put(["permissive_gates"], strict_gates=True)
            self.settings["strict_gates"] = strict
        length = self.fields.get("max_epochs", self.fields.get("episode_length"))
        for name, why in WITHOUT_EFFECT.items():
            if name in self.fields and not (name == "chunk_length" and self.fields[name] == length):
                self._pass_over(name, why)
