"""Fields of a ``config.json`` of the prior system that are neither settings nor aliases here.

A field is accepted if its value matches what Esper always does, and refused otherwise.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from esper.leyline.config.setting import shown
from esper.leyline.errors import UsageError

_SCHEDULE = (
    "the entropy weight follows entropy_decay: it falls over entropy_decay_steps rounds to "
    "entropy_end_factor times its initial value"
)
_SHAPING = "--reward selects the reward; terminal and paired have no shaping (docs/rewards.md)"
_PRICE = (
    "parameters have a price; basic and sparse charge 0.1 per 500000 parameters (docs/rewards.md)"
)
_ADVANCE = "a seed advances when the policy chooses ADVANCE"
_PLATEAU = "the policy observes the accuracy history itself"

FORMER: dict[str, tuple[tuple[Any, ...], str]] = {
    "ppo_updates_per_batch": ((1,), "ppo_epochs is the number of passes over each rollout"),
    "entropy_coef_start": ((None,), _SCHEDULE),
    "entropy_coef_end": ((None,), _SCHEDULE),
    "entropy_coef_min": ((), _SCHEDULE),
    "entropy_anneal_episodes": ((0,), _SCHEDULE),
    "entropy_anneal_rounds": ((0,), _SCHEDULE),
    "entropy_coef_per_head": ((None,), "the setting entropy is one weight for all heads"),
    "value_warmup_batches": ((0,), "value_weight is constant"),
    "value_coef_start": ((None,), "value_weight is constant"),
    "use_telemetry": ((), "must be true or false; telemetry_level sets how much is written"),
    "chunk_length": ((), "policies learn from whole episodes of max_epochs steps"),
    "reward_family": (("contribution",), "no reward depends on the loss (docs/rewards.md)"),
    "param_budget": ((500_000,), f"there is no parameter budget; {_PRICE}"),
    "param_penalty_weight": ((0.1,), _PRICE),
    "sparse_reward_scale": ((1,), "sparse rewards lie in [-1, 1] (docs/rewards.md)"),
    "rent_host_params_floor": ((0, 1), "the price is relative to all parameters of the host"),
    "basic_acc_delta_weight": ((5,), "basic weighs the change of accuracy by 5 (docs/rewards.md)"),
    "plateau_threshold": ((), _PLATEAU),
    "improvement_threshold": ((), _PLATEAU),
    "gradient_telemetry_stride": ((), "telemetry_level sets how much is written"),
    "permissive_gates": ((), "must be true or false; strict_gates is the opposite"),
    "auto_forward_g1": ((False,), _ADVANCE),
    "auto_forward_g2": ((False,), _ADVANCE),
    "auto_forward_g3": ((False,), _ADVANCE),
    "disable_pbrs": ((False,), _SHAPING),
    "disable_terminal_reward": ((False,), _SHAPING),
    "disable_anti_gaming": ((False,), _SHAPING),
    "max_grad_norm": (
        (1,),
        "gradients of hosts and seeds are clipped at 1; max_gradient_norm is the policy's clipping "
        "norm",
    ),
}
"""By field name: the values that are ignored, and the error message for all others."""

_SWITCHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "use_telemetry": ({"telemetry_level": "off"}, {}),
    "permissive_gates": ({"strict_gates": True}, {"strict_gates": False}),
}
"""By field name: the settings that replace the value false, and those that replace true."""


def translate(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The items of ``settings``, with fields of the prior system replaced or left out.

    Raises:
        UsageError: the value of a field is not supported; the message names the replacement.
    """
    length = settings.get("max_epochs", settings.get("episode_length"))
    for key, value in settings.items():
        name = key.replace("-", "_")
        if name in _SWITCHES and isinstance(value, bool):
            yield from _SWITCHES[name][value].items()
        elif name not in FORMER:
            yield key, value
        elif value not in FORMER[name][0] and not (name == "chunk_length" and value == length):
            raise UsageError(f"{key}: {FORMER[name][1]}; leave the field out, got {shown(value)}")
