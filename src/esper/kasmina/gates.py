"""Gates: what a seed must have shown before it may go on, and what may be done where.

Gates read quantities that are measured in every step, whatever is written to telemetry. A NaN
compares false, so what was not measured passes no gate.
"""

import torch
from torch import Tensor

from esper.kasmina.lifecycle import ALPHA_TOLERANCE, Rules
from esper.kasmina.seeds import AlphaMode, SeedSignals, SeedState, StageSets
from esper.leyline.actions import Op
from esper.leyline.stages import DEVELOPING, LIVING, PRUNABLE, Gate, Stage

HEALTHY = 0.7
"""Least gradient health that passes gates G2 and G5."""
LEAST_IMPROVEMENT = 0.005
"""Validation accuracy that TRAINING must have gained for a strict G2."""
LEAST_GRADIENT_RATIO = 0.10
"""Seed to host gradient ratio for a strict G2."""
LEAST_CONTRIBUTION = 0.01
"""Expected accuracy that a seed must contribute for a strict G5."""

_GATED = StageSets(
    LIVING,
    DEVELOPING,
    *((stage,) for stage in (Stage.DORMANT, Stage.GERMINATED, Stage.TRAINING)),
    *((stage,) for stage in (Stage.BLENDING, Stage.HOLDING)),
)
BLENDED = (Stage.BLENDING, Stage.HOLDING)
"""Stages in which alpha may be given another target."""
_CHANGEABLE = StageSets(BLENDED, PRUNABLE)


# Native twin: step/gates.h, may_germinate, may_advance, may_fossilise.
def open_gates(state: SeedState, signals: SeedSignals, rules: Rules) -> dict[Gate, Tensor]:
    """Which seeds would pass the gate to their next stage, bool ``[N, S]`` each.

    | gate | permissive | strict, besides |
    |---|---|---|
    | G0 | empty slot, seed limit not reached, no other seed developing if one at a time | |
    | G1 | GERMINATED | |
    | G2 | ``training_age`` steps in TRAINING, healthy gradients | improvement, gradient ratio |
    | G3 | alpha at its target of 1 and at rest | ``blending_age`` steps in BLENDING |
    | G5 | HOLDING, contribution measured, healthy gradients | contribution |

    G0 also asks for a blueprint that can live in the slot, see ``lifecycle.apply``. There is no G4.
    """
    living, developing, dormant, germinated, training, blending, holding = _GATED.of(state.stage)
    healthy = (signals.health >= HEALTHY) & ~signals.exploding
    full = (state.alpha - 1.0).abs() <= ALPHA_TOLERANCE
    aimed = state.ramp_target >= 1.0 - ALPHA_TOLERANCE
    germinates = dormant & (living.sum(1, keepdim=True) < rules.max_seeds)
    if rules.one_at_a_time:
        germinates &= ~developing.any(1, keepdim=True)
    blends = training & (state.stage_age >= rules.training_age) & healthy
    holds = blending & full & aimed & (state.ramp_mode == AlphaMode.HOLD)
    keeps = holding & signals.contribution.isfinite() & healthy
    if rules.strict:
        blends &= signals.improvement >= LEAST_IMPROVEMENT
        blends &= signals.gradient_ratio >= LEAST_GRADIENT_RATIO
        holds &= state.stage_age >= rules.blending_age
        keeps &= signals.contribution >= LEAST_CONTRIBUTION
    return {
        Gate.G0: germinates,
        Gate.G1: germinated,
        Gate.G2: blends,
        Gate.G3: holds,
        Gate.G5: keeps,
    }


# Native twin: step/gates.h, mark_legal.
def legal_slots(state: SeedState, signals: SeedSignals, rules: Rules) -> Tensor:
    """Where each operation may act, bool ``[N, ops, S]``; all true for WAIT.

    GERMINATE, ADVANCE and FOSSILISE are legal only where their gate would pass.
    """
    gates = open_gates(state, signals, rules)
    blended, prunable = _CHANGEABLE.of(state.stage)
    at_rest = state.ramp_mode == AlphaMode.HOLD
    old_enough = state.age >= rules.prune_age
    legal = {
        Op.WAIT: torch.ones_like(at_rest),
        Op.GERMINATE: gates[Gate.G0],
        Op.SET_ALPHA_TARGET: blended & at_rest,
        Op.PRUNE: prunable & old_enough & at_rest,
        Op.FOSSILISE: gates[Gate.G5],
        Op.ADVANCE: gates[Gate.G1] | gates[Gate.G2] | gates[Gate.G3],
    }
    return torch.stack([legal[op] for op in Op], 1)
