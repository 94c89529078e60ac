"""A ``config.json`` of the prior system: its fields that are no setting here, not even by an alias.

Each is taken with the values that ask for what Esper does anyway, and refused with any other.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from esper.leyline.config.values import shown
from esper.leyline.errors import UsageError

_SCHEDULE = (
    "entropy falls as entropy_decay says, over entropy_decay_steps rounds, to entropy_end_factor "
    "times itself"
)
_SHAPING = "--reward says what is paid for; terminal and paired shape nothing (docs/rewards.md)"
_PRICE = "parameters are priced by rent, in basic and sparse by 0.1 for 500000 (docs/rewards.md)"
_ADVANCE = "a seed goes on when the policy says ADVANCE"
_PLATEAU = "the policy sees the curve itself"

FORMER: dict[str, tuple[tuple[Any, ...], str]] = {
    "ppo_updates_per_batch": ((1,), "ppo_epochs is how often each round is learned from"),
    "entropy_coef_start": ((None,), _SCHEDULE),
    "entropy_coef_end": ((None,), _SCHEDULE),
    "entropy_coef_min": ((), _SCHEDULE),
    "entropy_anneal_episodes": ((0,), _SCHEDULE),
    "entropy_anneal_rounds": ((0,), _SCHEDULE),
    "entropy_coef_per_head": ((None,), "entropy weighs all heads alike"),
    "value_warmup_batches": ((0,), "value_weight is constant"),
    "value_coef_start": ((None,), "value_weight is constant"),
    "use_telemetry": ((), "must be true or false; telemetry_level says how much is written"),
    "chunk_length": ((), "policies learn from whole episodes, of max_epochs steps"),
    "reward_family": (("contribution",), "no reward pays for a loss (docs/rewards.md)"),
    "param_budget": ((500_000,), f"there is no parameter budget; {_PRICE}"),
    "param_penalty_weight": ((0.1,), _PRICE),
    "sparse_reward_scale": ((1,), "sparse lies in [-1, 1] (docs/rewards.md)"),
    "rent_host_params_floor": ((0, 1), "rent counts against all parameters of the host, no floor"),
    "basic_acc_delta_weight": ((5,), "basic weighs the gain of an episode by 5 (docs/rewards.md)"),
    "plateau_threshold": ((), _PLATEAU),
    "improvement_threshold": ((), _PLATEAU),
    "gradient_telemetry_stride": ((), "telemetry_level says how much is written"),
    "permissive_gates": ((), "must be true or false; strict_gates is its opposite"),
    "auto_forward_g1": ((False,), _ADVANCE),
    "auto_forward_g2": ((False,), _ADVANCE),
    "auto_forward_g3": ((False,), _ADVANCE),
    "disable_pbrs": ((False,), _SHAPING),
    "disable_terminal_reward": ((False,), _SHAPING),
    "disable_anti_gaming": ((False,), _SHAPING),
    "max_grad_norm": ((1,), "hosts and seeds clip at 1; max_gradient_norm is the policy's clip"),
}
"""By name: the values that need nothing here, and what there is in place of the others."""

_SWITCHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "use_telemetry": ({"telemetry_level": "off"}, {}),
    "permissive_gates": ({"strict_gates": True}, {"strict_gates": False}),
}
"""What false and true stand for."""


def modern(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Keys and values without the prior system's fields, in their place what they ask for here.

    Raises:
        UsageError: a field asks for what Esper does not have; says what replaces it.
    """
    length = settings.get("max_epochs", settings.get("episode_length"))
    for key, value in settings.items():
        name = key.replace("-", "_")
        if name in _SWITCHES and isinstance(value, bool):
            yield from _SWITCHES[name][value].items()
        elif name not in FORMER:
            yield key, value
        elif value not in FORMER[name][0] and not (name == "chunk_length" and value == length):
            raise UsageError(f"{key}: {FORMER[name][1]}; leave out {shown(value)}")
