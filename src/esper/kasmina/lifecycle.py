"""The lifecycle of seeds as pure functions over a struct of arrays ``[N, S]``.

``apply`` performs an action and ``tick`` advances time by one environment step. Neither uses
network parameters; the engine that computes the networks reads the state.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from esper.kasmina.cached_tensors import Table, cached_tensor
from esper.kasmina.seeds import AlphaMode, SeedState, StageSets, membership
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
from esper.leyline.stages import PRUNABLE, STAGE_COUNT, Stage

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


@dataclass(frozen=True, slots=True)
class Rules:
    """Limits of the lifecycle; ages are in environment steps.

    Attributes:
        training_age: minimum time in TRAINING before BLENDING (gate G2).
        blending_age: minimum time in BLENDING before HOLDING under strict gates (G3).
        prune_age: minimum age at which a seed may be pruned.
        embargo: steps for which a slot stays closed after a prune.
        max_seeds: maximum number of living seeds per environment.
        strict: whether gates also require improvement, see ``kasmina.gates``.
        one_at_a_time: whether a seed may germinate only while no slot of the environment is in one
            of the stages ``DEVELOPING``.
    """

    training_age: int
    blending_age: int
    prune_age: int
    embargo: int
    max_seeds: int
    strict: bool = False
    one_at_a_time: bool = True

    @classmethod
    def for_horizon(
        cls,
        episode_length: int,
        max_seeds: int,
        strict: bool = False,
        one_at_a_time: bool = True,
    ) -> "Rules":
        """The prior system's rules for episodes of 150 steps, scaled to ``episode_length``."""

        def steps_of(steps: int) -> int:
            return max(1, round(steps * episode_length / 150))

        ages = steps_of(10), steps_of(10), steps_of(5), steps_of(5)
        return cls(*ages, max_seeds, strict, one_at_a_time)


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
        state,
        alpha=alpha,
        alpha_velocity=alpha - state.alpha,
        ramp_mode=state.ramp_mode.masked_fill(ends, AlphaMode.HOLD),
        ramp_done=ramp_done,
        age=state.age + state.living,
        stage_age=stage_age,
    )
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
