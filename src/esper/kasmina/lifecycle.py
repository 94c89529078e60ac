"""The lifecycle of seeds as pure functions over a struct of arrays ``[N, S]``.

``apply`` performs an action and ``tick`` advances time by one environment step. Neither uses
network parameters; the engine that computes the networks reads the state. ``legal_slots`` says
which operations the gates allow. Gates read what every step measures, whatever the telemetry level.
NaN compares false, so a quantity that was not measured passes no gate.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce
from operator import or_

import torch
from torch import Tensor

from esper.kasmina.seeds import AlphaMode, SeedSignals, SeedState, StageSets, membership
from esper.kasmina.transfer import Table, cached_tensor
from esper.leyline.actions import (
    ALPHA_SPEED_STEPS,
    ALPHA_TARGETS,
    CURVE_STEEPNESS,
    HEAD_WIDTHS,
    HEADS,
    TEMPO_STEPS,
    Curve,
    Op,
    Style,
)
from esper.leyline.errors import UsageError
from esper.leyline.stages import DEVELOPING, LIVING, PRUNABLE, STAGE_COUNT, Gate, Stage

ALPHA_TOLERANCE = 1e-6
"""Two alphas are equal if they differ by at most this."""

_MOVES: dict[tuple[int, int], Stage] = {
    **{(Op.GERMINATE, stage): Stage.GERMINATED for stage in Stage},
    **{(Op.PRUNE, stage): Stage.PRUNED for stage in Stage},
    **{(Op.FOSSILISE, stage): Stage.FOSSILISED for stage in Stage},
    (Op.ADVANCE, Stage.GERMINATED): Stage.TRAINING,
    (Op.ADVANCE, Stage.TRAINING): Stage.BLENDING,
    (Op.ADVANCE, Stage.BLENDING): Stage.HOLDING,
}
"""The stage to which a legal operation moves a seed immediately."""

_ADVANCE_GATES = Gate.G1, Gate.G2, Gate.G3
"""The gates that ADVANCE passes."""
_STAGES = range(STAGE_COUNT)
NEXT_STAGE = Table([[_MOVES.get((op, stage), stage) for stage in _STAGES] for op in Op])
"""The stage after a legal operation, by ``Op`` and stage; ``_done`` makes two exceptions."""
FIRST_CURVE = Table(
    [Curve.SIGMOID if style == Style.SIGMOID_ADD else Curve.LINEAR for style in Style]
)
"""Curve of the first blend, by ``Style``."""
TARGETS, SPEEDS, TEMPOS = (
    Table(values) for values in (ALPHA_TARGETS, ALPHA_SPEED_STEPS, TEMPO_STEPS)
)
"""Target alpha, steps of a ramp and steps of the first blend, by option of the respective head."""
_DEVELOPMENT = StageSets((Stage.TRAINING,), (Stage.HOLDING,))
_TIMERS = StageSets((Stage.PRUNED,), (Stage.EMBARGOED,), (Stage.RESETTING,))
_CAN_BE_PRUNED = membership(PRUNABLE)

HEALTHY = 0.7
"""Minimum gradient health for gates G2 and G5."""
MIN_IMPROVEMENT = 0.005
"""Minimum improvement of validation accuracy during TRAINING for a strict G2."""
MIN_GRADIENT_RATIO = 0.10
"""Minimum ``SeedSignals.gradient_ratio`` for a strict G2."""
MIN_CONTRIBUTION = 0.01
"""Minimum contribution to expected accuracy for a strict G5."""

_GATES = StageSets(
    LIVING, DEVELOPING, *((stage,) for stage in (Stage.DORMANT, Stage.GERMINATED, Stage.TRAINING)),
    *((stage,) for stage in (Stage.BLENDING, Stage.HOLDING)),
)  # fmt: skip
BLENDING_STAGES = (Stage.BLENDING, Stage.HOLDING)
"""Stages in which alpha may be given a new target."""
_CHANGEABLE = StageSets(BLENDING_STAGES, PRUNABLE)


@dataclass(frozen=True, slots=True)
class Rules:
    """Limits of the lifecycle; ages are in environment steps.

    Attributes:
        training_age: minimum time in TRAINING before BLENDING (gate G2).
        blending_age: minimum time in BLENDING before HOLDING under strict gates (G3).
        prune_age: minimum age at which a seed may be pruned.
        embargo: steps for which a slot stays closed after a prune.
        max_seeds: maximum number of living seeds per environment.
        strict: whether gates also require improvement, see ``open_gates``.
        one_at_a_time: whether a seed may germinate only while no slot of the environment is in one
            of the stages ``DEVELOPING``.
        automatic: gates that open by themselves, see ``advance_automatically``.
    """

    training_age: int
    blending_age: int
    prune_age: int
    embargo: int
    max_seeds: int
    strict: bool = False
    one_at_a_time: bool = True
    automatic: tuple[Gate, ...] = ()

    @classmethod
    def for_horizon(
        cls,
        episode_length: int,
        max_seeds: int,
        strict: bool = False,
        one_at_a_time: bool = True,
        automatic: tuple[Gate, ...] = (),
    ) -> "Rules":
        """The prior system's rules for episodes of 150 steps, scaled to ``episode_length``."""

        def steps_of(steps: int) -> int:
            return max(1, round(steps * episode_length / 150))

        ages = steps_of(10), steps_of(10), steps_of(5), steps_of(5)
        return cls(*ages, max_seeds, strict, one_at_a_time, automatic)


def automatic_gates(names: Sequence[str]) -> tuple[Gate, ...]:
    """The gates of the setting ``auto_advance``.

    Raises:
        UsageError: a name is none of g1, g2 and g3.
    """
    gates = {gate.name.lower(): gate for gate in _ADVANCE_GATES}
    unknown = next((name for name in names if name.lower() not in gates), None)
    if unknown is not None:
        raise UsageError(f"auto_advance: must name gates of {', '.join(gates)}, got {unknown!r}")
    return tuple(gate for name, gate in gates.items() if name in {n.lower() for n in names})


def apply(
    state: SeedState, actions: Tensor, legal: Tensor, kinds: Tensor
) -> tuple[SeedState, Tensor]:
    """Perform the actions that are legal.

    Args:
        state: the seeds before the action.
        actions: int64 ``[N, heads]`` in the order of ``leyline.actions.HEADS``.
        legal: ``gates.legal_slots(state, ...)``.
        kinds: bool ``[S, blueprints]``, whether a blueprint can live in a slot.

    Returns:
        The seeds after the action, and whether each action was legal, bool ``[N]``. An illegal
        action changes nothing; an action out of range is illegal.
    """
    last = last_options(state.stage.shape[1], actions.device)
    options = actions.clamp(torch.zeros_like(last), last)
    in_range = (options == actions).all(1, keepdim=True)
    choice = dict(zip(HEADS, options[..., None].unbind(1), strict=True))
    op, slot = choice["op"], choice["slot"]
    rows = torch.arange(len(op), device=op.device)[:, None]
    success = in_range & legal[rows, op, slot]
    success &= (op != Op.GERMINATE) | kinds[slot, choice["blueprint"]]
    slot_ops = torch.zeros_like(state.stage).scatter_(1, slot, op.masked_fill(~success, Op.WAIT))
    return _done(state, slot_ops, choice), success[:, 0]


def last_options(slots: int, device: torch.device) -> Tensor:
    """The largest option of each head, int64 ``[heads]``."""
    widths = HEAD_WIDTHS | {"slot": slots}
    return cached_tensor(tuple(widths[head] - 1 for head in HEADS), device)


def _done(state: SeedState, slot_ops: Tensor, choice: dict[str, Tensor]) -> SeedState:
    """The seeds after each slot's operation.

    Args:
        state: the seeds before the operation.
        slot_ops: ``Op`` of each slot, int64 ``[N, S]``.
        choice: options of the heads, int64 ``[N, 1]`` each.
    """
    germinates, advances, retargets, prunes = (
        slot_ops == op for op in (Op.GERMINATE, Op.ADVANCE, Op.SET_ALPHA_TARGET, Op.PRUNE)
    )
    training, holding = _DEVELOPMENT.of(state.stage)
    target, steps = TARGETS[choice["alpha_target"]], SPEEDS[choice["alpha_speed"]]
    fading = prunes & (steps > 0) & (state.alpha > 0)
    lowers = holding & (fading | (retargets & (target < 1.0 - ALPHA_TOLERANCE)))
    stage = torch.where(fading, state.stage, NEXT_STAGE[slot_ops, state.stage])

    blends = advances & training
    state = replace(
        state,
        # All other fields of an empty slot are already 0.
        blueprint=torch.where(germinates, choice["blueprint"], state.blueprint),
        style=torch.where(germinates, choice["style"], state.style),
        tempo=torch.where(germinates, TEMPOS[choice["tempo"]], state.tempo),
        goal=torch.where(germinates, target, state.goal),
    )
    state = _ramp(
        state,
        blends | retargets | fading,
        target=torch.where(blends, state.goal, target).masked_fill(fading, 0.0),
        steps=torch.where(blends, state.tempo, steps),
        curve=torch.where(blends, FIRST_CURVE[state.style], choice["alpha_curve"]),
    )
    state = _in_stage(state, stage.masked_fill(lowers, Stage.BLENDING))
    return _at_rest(replace(state, pruning=state.pruning | fading), prunes & ~fading)


def advance_automatically(state: SeedState, signals: SeedSignals, rules: Rules) -> SeedState:
    """The seeds after those that meet the condition of an automatic gate have advanced.

    At most one stage in a step: all gates are asked before any seed moves.
    """
    if not rules.automatic:
        return state
    gates = open_gates(state, signals, rules)
    moves = torch.stack([gates[gate] for gate in rules.automatic]).any(0)
    zeros = torch.zeros_like(state.stage[:, :1])
    return _done(state, torch.where(moves, Op.ADVANCE, Op.WAIT), dict.fromkeys(HEADS, zeros))


def roll_back(state: SeedState, where: Tensor) -> SeedState:
    """Prune all seeds that are not fossilised in the environments ``where``, bool ``[N]``."""
    where = where[:, None] & _CAN_BE_PRUNED[state.stage]
    return _at_rest(_in_stage(state, state.stage.masked_fill(where, Stage.PRUNED)), where)


def tick(state: SeedState, rules: Rules) -> SeedState:
    """The seeds one environment step later: alpha ramps, ages and embargoes advance."""
    pruned, embargoed, resetting = _TIMERS.of(state.stage)
    # Only seeds in BLENDING have another mode.
    ramping = state.ramp_mode != AlphaMode.HOLD
    ramp_done = state.ramp_done + ramping
    ends = ramping & (ramp_done >= state.ramp_steps)
    fraction = progress(state.ramp_curve, ramp_done / state.ramp_steps.clamp(min=1))
    between = state.ramp_start + (state.ramp_target - state.ramp_start) * fraction
    alpha = torch.where(ramping, torch.where(ends, state.ramp_target, between), state.alpha)
    stage_age = state.stage_age + (state.stage != Stage.DORMANT)
    reopens = embargoed & (stage_age >= rules.embargo)
    faded_out = ends & state.pruning
    stage = state.stage.masked_fill(pruned, Stage.EMBARGOED).masked_fill(reopens, Stage.RESETTING)
    later = replace(
        state, alpha=alpha, alpha_velocity=alpha - state.alpha,
        ramp_mode=state.ramp_mode.masked_fill(ends, AlphaMode.HOLD), ramp_done=ramp_done,
        age=state.age + state.living, stage_age=stage_age,
    )  # fmt: skip
    later = _in_stage(later, stage.masked_fill(faded_out, Stage.PRUNED))
    return _at_rest(later, faded_out).with_empty_slots(resetting)


def progress(curve: Tensor, time: Tensor) -> Tensor:
    """Progress of a ramp at ``time``, both in [0, 1]; every ``Curve`` rises from 0 to 1."""
    cosine = 0.5 * (1.0 - torch.cos(torch.pi * time))
    steepness, low, span = sigmoids(time.device)[curve].unbind(-1)
    sigmoid = (torch.sigmoid(steepness * (time - 0.5)) - low) / span
    return torch.where(
        curve == Curve.LINEAR, time, torch.where(curve == Curve.COSINE, cosine, sigmoid)
    )


@cache
def sigmoids(device: torch.device) -> Tensor:
    """Parameters of the sigmoid of each ``Curve``, ``[curves, 3]``: steepness, value at time 0, and
    difference between the values at times 1 and 0."""
    with torch.inference_mode(False):
        steepness = torch.tensor(CURVE_STEEPNESS, device=device).clamp(min=1.0)
        low, high = torch.sigmoid(-steepness / 2), torch.sigmoid(steepness / 2)
        return torch.stack([steepness, low, high - low], 1)


def _in_stage(state: SeedState, stage: Tensor) -> SeedState:
    """The seeds moved to ``stage``; where the stage changes, its age restarts at 0."""
    stage_age = state.stage_age.masked_fill(stage != state.stage, 0)
    return replace(state, stage=stage, stage_age=stage_age)


def _at_rest(state: SeedState, where: Tensor) -> SeedState:
    """The seeds with alpha 0 and no ramp in the slots ``where``."""
    return replace(
        state,
        alpha=state.alpha.masked_fill(where, 0.0),
        ramp_mode=state.ramp_mode.masked_fill(where, AlphaMode.HOLD),
        pruning=state.pruning & ~where,
    )


def _ramp(
    state: SeedState, where: Tensor, target: Tensor, steps: Tensor, curve: Tensor
) -> SeedState:
    """Start a ramp of alpha; a ramp of 0 steps, or to the current alpha, ends immediately."""
    jump = (steps == 0) | ((target - state.alpha).abs() <= ALPHA_TOLERANCE)
    mode = torch.where(target > state.alpha, AlphaMode.UP, AlphaMode.DOWN)
    return replace(
        state,
        alpha=torch.where(where & jump, target, state.alpha),
        ramp_start=torch.where(where, state.alpha, state.ramp_start),
        ramp_target=torch.where(where, target, state.ramp_target),
        ramp_mode=torch.where(where, mode.masked_fill(jump, AlphaMode.HOLD), state.ramp_mode),
        ramp_curve=torch.where(where, curve, state.ramp_curve),
        ramp_steps=torch.where(where, steps, state.ramp_steps),
        ramp_done=state.ramp_done.masked_fill(where, 0),
    )


def open_gates(state: SeedState, signals: SeedSignals, rules: Rules) -> dict[Gate, Tensor]:
    """Which slots meet the condition of each gate, bool ``[N, S]`` per gate.

    | gate | permissive | strict, in addition |
    |---|---|---|
    | G0 | empty slot, below the seed limit, no other seed developing if one at a time | |
    | G1 | GERMINATED | |
    | G2 | ``training_age`` steps in TRAINING, healthy gradients | improvement, gradient ratio |
    | G3 | alpha is 1, its target is 1, no ramp in progress | ``blending_age`` steps in BLENDING |
    | G5 | HOLDING, contribution measured, healthy gradients | contribution |

    G0 also requires a blueprint of the slot's family, which ``apply`` checks. There is no
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

    GERMINATE, ADVANCE and FOSSILISE are legal only where their gate passes; ADVANCE not through an
    automatic one.
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
        Op.ADVANCE: _advances(gates, rules),
    }
    return torch.stack([legal[op] for op in Op], 1)


def _advances(gates: dict[Gate, Tensor], rules: Rules) -> Tensor:
    """Where the action ADVANCE passes a gate that does not open by itself, bool ``[N, S]``."""
    by_action = [gates[gate] for gate in _ADVANCE_GATES if gate not in rules.automatic]
    return reduce(or_, by_action) if by_action else torch.zeros_like(gates[Gate.G1])
