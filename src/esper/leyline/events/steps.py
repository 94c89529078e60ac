"""Events of environment steps and of the seeds in them.

Values of all environments stand in one array, so a step costs one line.
"""

from esper.leyline.events.event import Number, StepEvent


class EpochCompleted(StepEvent, tag="EPOCH_COMPLETED"):
    """One environment step, one value an environment; slots one list each."""

    train_loss: list[Number]
    """Of the epoch; NaN where the host was rolled back."""
    train_accuracy: list[Number]
    """Likewise, in [0, 1]."""
    validation_loss: list[Number]
    """Of host and seeds together."""
    validation_accuracy: list[Number]
    """Likewise, in [0, 1]."""
    expected_accuracy: list[Number]
    """Mean probability of the true class in validation."""
    twin_validation_accuracy: list[Number]
    """That of the never-grow twin."""
    twin_expected_accuracy: list[Number]
    """That of the never-grow twin."""
    reward: list[Number]
    """Paid for this step."""
    added_parameters: list[int]
    """Parameters that pay rent."""
    op: list[int]
    """The operation that was asked for, ``leyline.actions.Op``."""
    slot: list[int]
    """The slot it names."""
    success: list[bool]
    """Whether it was legal."""
    stage: list[list[int]]
    """``leyline.stages.Stage`` of each slot; 0 for a slot that the host does not have."""
    blueprint: list[list[int]]
    """Number of the blueprint in each slot; 0 in an empty one."""
    alpha: list[list[Number]]
    """How far each seed is blended in, in [0, 1]."""


class DecisionsMade(StepEvent, tag="DECISIONS_MADE"):
    """What the policy saw itself free to do in a step, and did; one value an environment."""

    actions: list[list[int]]
    """Choice of each head, in the order of ``leyline.actions.HEADS``."""
    legal_ops: list[list[int]]
    """The operations that were legal."""
    op_probability: list[list[Number]]
    """Probability of every operation; empty for a policy that has none."""
    log_prob: list[Number]
    """Of the whole action."""
    value: list[Number]
    """What the critic expects, in units of the normalised return."""


class SeedSignalsMeasured(StepEvent, tag="SEED_SIGNALS_MEASURED"):
    """Debug level: what was measured of every seed, ``[environment][slot]``."""

    contribution: list[list[Number]]
    """Expected accuracy with minus without the seed; NaN where none acts."""
    gradient_norm: list[list[Number]]
    """Of the seed's parameters."""
    gradient_health: list[list[Number]]
    """In [0, 1], see ``tolaria.health``."""


class SeedEvent(StepEvent):
    """Seeds to which the same happened in one step; the lists are parallel."""

    environment: list[int]
    """Which environment."""
    slot: list[int]
    """Which of its slots, from 0."""
    blueprint: list[str]
    """What lives there."""


class SeedGerminated(SeedEvent, tag="SEED_GERMINATED"):
    """Seeds were born; the lists are parallel."""


class SeedStageChanged(SeedEvent, tag="SEED_STAGE_CHANGED"):
    """Slots went from one stage to another; the lists are parallel."""

    previous: list[str]
    """Stage before."""
    stage: list[str]
    """Stage now."""


class SeedFossilized(SeedEvent, tag="SEED_FOSSILIZED"):
    """Seeds were kept for good; the lists are parallel."""

    parameters: list[int]
    """How many each seed has."""


class SeedPruned(SeedEvent, tag="SEED_PRUNED"):
    """Seeds were removed; the lists are parallel."""


class GovernorRollback(StepEvent, tag="GOVERNOR_ROLLBACK"):
    """Hosts that had diverged were put back to their snapshots; the lists are parallel."""

    environment: list[int]
    """Which environment."""
    reason: list[str]
    """NOT_FINITE, COLLAPSE or RUNAWAY."""
