"""Gates, the conditions for advancing a seed, and the operations that are legal in each slot.

Gates read quantities that every step measures, whatever the telemetry level. NaN compares false, so
a quantity that was not measured passes no gate.
"""

import torch
from torch import Tensor

from esper.kasmina.lifecycle import ALPHA_TOLERANCE, Rules
from esper.kasmina.seeds import AlphaMode, SeedSignals, SeedState, StageSets
from esper.leyline.actions import Op
from esper.leyline.stages import DEVELOPING, LIVING, PRUNABLE, Gate, Stage

HEALTHY = 0.7
"""Minimum gradient health for gates G2 and G5."""
MIN_IMPROVEMENT = 0.005
"""Minimum improvement of validation accuracy during TRAINING for a strict G2."""
MIN_GRADIENT_RATIO = 0.10
"""Minimum ``SeedSignals.gradient_ratio`` for a strict G2."""
MIN_CONTRIBUTION = 0.01
"""Minimum contribution to expected accuracy for a strict G5."""

_GATES = StageSets(
    LIVING,
    DEVELOPING,
    *((stage,) for stage in (Stage.DORMANT, Stage.GERMINATED, Stage.TRAINING)),
    *((stage,) for stage in (Stage.BLENDING, Stage.HOLDING)),
)
BLENDING_STAGES = (Stage.BLENDING, Stage.HOLDING)
"""Stages in which alpha may be given a new target."""
_CHANGEABLE = StageSets(BLENDING_STAGES, PRUNABLE)


def open_gates(state: SeedState, signals: SeedSignals, rules: Rules) -> dict[Gate, Tensor]:
    """Which slots meet the condition of each gate, bool ``[N, S]`` per gate.

    | gate | permissive | strict, in addition |
    |---|---|---|
    | G0 | empty slot, below the seed limit, no other seed developing if one at a time | |
    | G1 | GERMINATED | |
    | G2 | ``training_age`` steps in TRAINING, healthy gradients | improvement, gradient ratio |
    | G3 | alpha is 1, its target is 1, no ramp in progress | ``blending_age`` steps in BLENDING |
    | G5 | HOLDING, contribution measured, healthy gradients | contribution |

    G0 also requires a blueprint of the slot's family, which ``lifecycle.apply`` checks. There is no
    G4.
    """
    living, developing, dormant, germinated, training, blending, holding = _GATES.of(state.stage)
    healthy = (signals.health >= HEALTHY) & ~signals.exploding
    is_full = (state.alpha - 1.0).abs() <= ALPHA_TOLERANCE
    target_is_full = state.ramp_target >= 1.0 - ALPHA_TOLERANCE
    germinates = dormant & (living.sum(1, keepdim=True) < rules.max_seeds)
    if rules.one_at_a_time:
        germinates &= ~developing.any(1, keepdim=True)
    blends = training & (state.stage_age >= rules.training_age) & healthy
    holds = blending & is_full & target_is_full & (state.ramp_mode == AlphaMode.HOLD)
    keeps = holding & signals.contribution.isfinite() & healthy
    if rules.strict:
        blends &= signals.improvement >= MIN_IMPROVEMENT
        blends &= signals.gradient_ratio >= MIN_GRADIENT_RATIO
        holds &= state.stage_age >= rules.blending_age
        keeps &= signals.contribution >= MIN_CONTRIBUTION
    return {
        Gate.G0: germinates,
        Gate.G1: germinated,
        Gate.G2: blends,
        Gate.G3: holds,
        Gate.G5: keeps,
    }


def legal_slots(state: SeedState, signals: SeedSignals, rules: Rules) -> Tensor:
    """The slots in which each operation is legal, bool ``[N, ops, S]``; all true for WAIT.

    GERMINATE, ADVANCE and FOSSILISE are legal only where their gate passes.
    """
    gates = open_gates(state, signals, rules)
    blends, prunable = _CHANGEABLE.of(state.stage)
    at_rest = state.ramp_mode == AlphaMode.HOLD
    old_enough = state.age >= rules.prune_age
    legal = {
        Op.WAIT: torch.ones_like(at_rest),
        Op.GERMINATE: gates[Gate.G0],
        Op.SET_ALPHA_TARGET: blends & at_rest,
        Op.PRUNE: prunable & old_enough & at_rest,
        Op.FOSSILISE: gates[Gate.G5],
        Op.ADVANCE: gates[Gate.G1] | gates[Gate.G2] | gates[Gate.G3],
    }
    return torch.stack([legal[op] for op in Op], 1)
