"""The life of seeds as pure functions over a struct of arrays ``[N, S]``.

``apply`` is what an action does, ``tick`` is what the passing of one environment step does.
Neither knows about networks: the engine reads the state to know what to compute.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from esper.kasmina.constants import constant
from esper.kasmina.seeds import AlphaMode, SeedState, among
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
from esper.leyline.stages import PRUNABLE, Stage

ALPHA_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Rules:
    """What the lifecycle allows; ages are in environment steps.

    Attributes:
        training_age: least time in TRAINING before BLENDING (gate G2).
        blending_age: least time in BLENDING before HOLDING under strict gates (G3).
        prune_age: least age of a seed before it may be pruned.
        embargo: how long a slot stays closed after a prune.
        max_seeds: most living seeds an environment may have.
        strict: whether gates also ask for improvement, see ``kasmina.gates``.
        one_at_a_time: whether a seed may germinate only while no other develops.
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
        """Scale the ages of the 150-step original to another episode length."""

        def scaled(steps: int) -> int:
            return max(1, round(steps * episode_length / 150))

        ages = scaled(10), scaled(10), scaled(5), scaled(5)
        return cls(*ages, max_seeds, strict, one_at_a_time)


def apply(
    state: SeedState, actions: Tensor, legal: Tensor, kinds: Tensor
) -> tuple[SeedState, Tensor]:
    """Do what the actions say, where they are legal.

    Args:
        state: the seeds before.
        actions: int64 ``[N, heads]`` in the order of ``leyline.actions.HEADS``.
        legal: ``gates.legal_slots(state, ...)``.
        kinds: bool ``[S, blueprints]``, the blueprints that can live in each slot.

    Returns:
        The seeds after, and bool ``[N]``: whether the action was legal. An illegal action, one
        out of range included, changes nothing.
    """
    slots = state.stage.shape[1]
    widths = constant(
        tuple(slots if head == "slot" else HEAD_WIDTHS[head] for head in HEADS), actions.device
    )
    in_range = ((actions >= 0) & (actions < widths)).all(1)
    choice = dict(zip(HEADS, actions.clamp(min=0).minimum(widths - 1).unbind(1), strict=True))
    op, slot = choice["op"], choice["slot"]
    rows = torch.arange(len(op), device=op.device)
    success = in_range & legal[rows, op, slot]
    success &= (op != Op.GERMINATE) | kinds[slot, choice["blueprint"]]
    chosen = torch.zeros_like(state.pruning)
    chosen[rows, slot] = success

    def acts(wanted: Op) -> Tensor:
        return chosen & (op == wanted)[:, None]

    state = _germinate(state, acts(Op.GERMINATE), choice)
    state = _advance(state, acts(Op.ADVANCE))
    state = _fossilise(state, acts(Op.FOSSILISE))
    state = _retarget(state, acts(Op.SET_ALPHA_TARGET), choice)
    return _prune(state, acts(Op.PRUNE), choice), success


def roll_back(state: SeedState, where: Tensor) -> SeedState:
    """Prune every seed that is not fossilised in the environments ``where``, bool ``[N]``."""
    return _pruned(state, where[:, None] & among(state.stage, PRUNABLE))


def tick(state: SeedState, rules: Rules) -> SeedState:
    """Let one environment step pass: alpha ramps, ages, embargo."""
    stage = state.stage
    ramping = (stage == Stage.BLENDING) & (state.ramp_mode != AlphaMode.HOLD)
    ramp_done = state.ramp_done + ramping
    finished = ramping & (ramp_done >= state.ramp_steps)
    part = progress(state.ramp_curve, ramp_done / state.ramp_steps.clamp(min=1))
    on_the_way = state.ramp_start + (state.ramp_target - state.ramp_start) * part
    alpha = torch.where(ramping, torch.where(finished, state.ramp_target, on_the_way), state.alpha)
    ticked = replace(
        state,
        alpha=alpha,
        alpha_velocity=alpha - state.alpha,
        ramp_mode=state.ramp_mode.masked_fill(finished, AlphaMode.HOLD),
        ramp_done=ramp_done,
        age=state.age + state.living,
        stage_age=state.stage_age + (stage != Stage.DORMANT),
    )
    over = ticked.stage_age >= rules.embargo
    ticked = _enter(ticked, stage == Stage.PRUNED, Stage.EMBARGOED)
    ticked = _enter(ticked, (stage == Stage.EMBARGOED) & over, Stage.RESETTING)
    ticked = _pruned(ticked, finished & state.pruning)
    return ticked.emptied(stage == Stage.RESETTING)


def progress(curve: Tensor, time: Tensor) -> Tensor:
    """How far a ramp has come at ``time`` in [0, 1]: 0 at 0 and 1 at 1 for every ``Curve``."""
    cosine = 0.5 * (1.0 - torch.cos(torch.pi * time))
    steepness = constant(CURVE_STEEPNESS, time.device)[curve].clamp(min=1.0)
    low, high = torch.sigmoid(-steepness / 2), torch.sigmoid(steepness / 2)
    sigmoid = (torch.sigmoid(steepness * (time - 0.5)) - low) / (high - low)
    return torch.where(
        curve == Curve.LINEAR, time, torch.where(curve == Curve.COSINE, cosine, sigmoid)
    )


def _enter(state: SeedState, where: Tensor, stage: Stage) -> SeedState:
    return replace(
        state,
        stage=state.stage.masked_fill(where, stage),
        stage_age=state.stage_age.masked_fill(where, 0),
    )


def _germinate(state: SeedState, where: Tensor, choice: dict[str, Tensor]) -> SeedState:
    """An empty slot has nothing that would have to be forgotten."""
    goal = _lookup(ALPHA_TARGETS, choice["alpha_target"])[:, None]
    return replace(
        state,
        stage=state.stage.masked_fill(where, Stage.GERMINATED),
        blueprint=torch.where(where, choice["blueprint"][:, None], state.blueprint),
        style=torch.where(where, choice["style"][:, None], state.style),
        tempo=torch.where(where, _lookup(TEMPO_STEPS, choice["tempo"])[:, None], state.tempo),
        goal=torch.where(where, goal, state.goal),
    )


def _advance(state: SeedState, where: Tensor) -> SeedState:
    germinated = where & (state.stage == Stage.GERMINATED)
    training = where & (state.stage == Stage.TRAINING)
    blending = where & (state.stage == Stage.BLENDING)
    curve = torch.where(state.style == Style.SIGMOID_ADD, Curve.SIGMOID, Curve.LINEAR)
    state = _enter(state, germinated, Stage.TRAINING)
    state = _ramp(state, training, state.goal, state.tempo, curve)
    state = _enter(state, training, Stage.BLENDING)
    return replace(
        _enter(state, blending, Stage.HOLDING), alpha=state.alpha.masked_fill(blending, 1.0)
    )


def _fossilise(state: SeedState, where: Tensor) -> SeedState:
    return _enter(state, where, Stage.FOSSILISED)


def _retarget(state: SeedState, where: Tensor, choice: dict[str, Tensor]) -> SeedState:
    target = _lookup(ALPHA_TARGETS, choice["alpha_target"])[:, None]
    steps = _lookup(ALPHA_SPEED_STEPS, choice["alpha_speed"])[:, None]
    lowered = where & (state.stage == Stage.HOLDING) & (target < 1.0 - ALPHA_TOLERANCE)
    state = _ramp(state, where, target, steps, choice["alpha_curve"][:, None])
    return _enter(state, lowered, Stage.BLENDING)


def _prune(state: SeedState, where: Tensor, choice: dict[str, Tensor]) -> SeedState:
    steps = _lookup(ALPHA_SPEED_STEPS, choice["alpha_speed"])[:, None].expand_as(where)
    slowly = where & (steps > 0) & (state.alpha > 0)
    state = _pruned(state, where & ~slowly)
    state = _ramp(
        state, slowly, torch.zeros_like(state.alpha), steps, choice["alpha_curve"][:, None]
    )
    state = _enter(state, slowly & (state.stage == Stage.HOLDING), Stage.BLENDING)
    return replace(state, pruning=state.pruning | slowly)


def _pruned(state: SeedState, where: Tensor) -> SeedState:
    state = _enter(state, where, Stage.PRUNED)
    return replace(
        state,
        alpha=state.alpha.masked_fill(where, 0.0),
        ramp_mode=state.ramp_mode.masked_fill(where, AlphaMode.HOLD),
        pruning=state.pruning & ~where,
    )


def _ramp(
    state: SeedState, where: Tensor, target: Tensor, steps: Tensor, curve: Tensor
) -> SeedState:
    """Begin a ramp of alpha; one of 0 steps, or to where alpha is already, is over at once."""
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


def _lookup(values: tuple[float, ...], index: Tensor) -> Tensor:
    return constant(values, index.device)[index]
