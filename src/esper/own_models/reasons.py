"""Why an action was taken, in the figures that the policy saw."""

from torch import Tensor

from esper.kasmina.seeds import SeedSignals, SeedState
from esper.leyline.actions import ALPHA_SPEED_STEPS, ALPHA_TARGETS, BLUEPRINTS, Op, Style
from esper.leyline.stages import Stage
from esper.tamiyo.policy.features import Progress


def reason_for(
    op: Op,
    slot: int,
    choice: dict[str, int],
    state: SeedState,
    signals: SeedSignals,
    progress: Progress,
) -> str:
    """An action that took effect, and the figures behind it.

    Args:
        op: the operation.
        slot: index of its slot.
        choice: options of all heads.
        state: the seeds before it, ``[1, S]``.
        signals: their measurements.
        progress: the scores so far.
    """
    if op is Op.GERMINATE:
        blueprint, style = BLUEPRINTS[choice["blueprint"]], Style(choice["style"]).name
        return f"{blueprint} germinates, {style} ({_trend(progress.losses)})"
    name = BLUEPRINTS[int(state.blueprint[0, slot])]
    contribution = float(signals.contribution[0, slot])
    points = f"contribution {100 * contribution:+.2f} points"
    if op is Op.PRUNE:
        known = contribution == contribution
        return f"{name} is pruned ({points if known else 'contribution unknown'})"
    if op is Op.FOSSILISE:
        return f"{name} becomes FOSSILISED ({points})"
    if op is Op.SET_ALPHA_TARGET:
        steps = ALPHA_SPEED_STEPS[choice["alpha_speed"]]
        target = ALPHA_TARGETS[choice["alpha_target"]]
        return f"{name} goes to alpha {target} in {steps} epochs ({points})"
    stage = Stage(int(state.stage[0, slot]))
    health = f"gradient health {float(signals.health[0, slot]):.2f}"
    after = {
        Stage.GERMINATED: ("TRAINING", "newly germinated"),
        Stage.TRAINING: ("BLENDING", f"{int(state.stage_age[0, slot])} epochs old, {health}"),
        Stage.BLENDING: ("HOLDING", f"alpha is 1, {points}"),
    }[stage]
    return f"{name} becomes {after[0]} ({after[1]})"


def _trend(losses: Tensor) -> str:
    """How the validation loss changed over the last epochs; ``losses [1, epochs]``, latest last."""
    known = [x for x in losses[0].tolist() if x == x]
    if len(known) < 2:
        return "first epochs"
    change = (known[-1] - known[0]) / max(abs(known[0]), 1e-12) / (len(known) - 1)
    return f"validation loss {100 * change:+.1f} % an epoch over the last {len(known) - 1}"
