"""Events of environment steps and of seeds.

One event holds the values of all environments in lists, so a step takes one line.
"""

from esper.leyline.events.event import Number, StepEvent


class EpochCompleted(StepEvent, tag="EPOCH_COMPLETED"):
    """One environment step. All lists have one value or one list of slots per environment."""

    train_loss: list[Number]
    """Mean training loss of the step; NaN if the host was rolled back."""
    train_accuracy: list[Number]
    """Training accuracy in [0, 1]; NaN if the host was rolled back."""
    validation_loss: list[Number]
    """Validation loss of the host with its seeds."""
    validation_accuracy: list[Number]
    """Validation accuracy of the host with its seeds, in [0, 1]."""
    expected_accuracy: list[Number]
    """Mean probability of the true class on the validation data."""
    twin_validation_accuracy: list[Number]
    """Validation accuracy of the never-grow twin."""
    twin_expected_accuracy: list[Number]
    """Expected accuracy of the never-grow twin."""
    reward: list[Number]
    """Reward of this step."""
    added_parameters: list[int]
    """Parameters that pay the price."""
    op: list[int]
    """The requested operation, ``leyline.actions.Op``."""
    slot: list[int]
    """Index of the slot that the action names."""
    success: list[bool]
    """Whether the action was legal."""
    stage: list[list[int]]
    """``leyline.stages.Stage`` of each slot; 0 for a slot that the host does not have."""
    blueprint: list[list[int]]
    """Number of the blueprint in each slot; 0 in an empty slot."""
    alpha: list[list[Number]]
    """Alpha of each seed: how far it is blended in, in [0, 1]."""


class DecisionsMade(StepEvent, tag="DECISIONS_MADE"):
    """Legal operations and chosen actions in a step. All lists have one value per environment."""

    actions: list[list[int]]
    """Option chosen by each head, in the order of ``leyline.actions.HEADS``."""
    legal_ops: list[list[int]]
    """The operations that were legal."""
    op_probability: list[list[Number]]
    """Probability of each operation; empty for a policy without probabilities."""
    log_prob: list[Number]
    """Log-probability of the whole action."""
    value: list[Number]
    """Value predicted by the critic, in units of the normalised return."""


class SeedSignalsMeasured(StepEvent, tag="SEED_SIGNALS_MEASURED"):
    """Signals measured for every seed, ``[environment][slot]``."""

    contribution: list[list[Number]]
    """Expected accuracy with the seed minus without it; NaN if no seed acts in the slot."""
    gradient_norm: list[list[Number]]
    """Gradient norm of the seed's parameters."""
    gradient_health: list[list[Number]]
    """Gradient health in [0, 1], see ``tolaria.health``."""


class SeedContributions(StepEvent, tag="SEED_CONTRIBUTIONS"):
    """What the seeds that act contribute, in every fourth step. The lists are parallel."""

    environment: list[int]
    """Index of the environment."""
    slot: list[int]
    """Index of the slot, from 0."""
    contribution: list[Number]
    """Expected accuracy with the seed minus without it, rounded to 0.0001."""


class SeedEvent(StepEvent):
    """An event that is the same for several seeds in one step. The lists are parallel."""

    environment: list[int]
    """Index of the environment."""
    slot: list[int]
    """Index of the slot, from 0."""
    blueprint: list[str]
    """Name of the seed's blueprint."""


class SeedGerminated(SeedEvent, tag="SEED_GERMINATED"):
    """Seeds germinated. The lists are parallel."""


class SeedStageChanged(SeedEvent, tag="SEED_STAGE_CHANGED"):
    """Slots changed stage. The lists are parallel."""

    previous: list[str]
    """Previous stage."""
    stage: list[str]
    """New stage."""


class SeedFossilized(SeedEvent, tag="SEED_FOSSILIZED"):
    """Seeds fossilised. The lists are parallel."""

    parameters: list[int]
    """Number of parameters of each seed."""


class SeedPruned(SeedEvent, tag="SEED_PRUNED"):
    """Seeds were pruned. The lists are parallel."""


class GovernorRollback(StepEvent, tag="GOVERNOR_ROLLBACK"):
    """Diverged hosts were rolled back to their snapshots. The lists are parallel."""

    environment: list[int]
    """Index of the environment."""
    reason: list[str]
    """Reason for the rollback: NOT_FINITE, COLLAPSE or RUNAWAY."""
