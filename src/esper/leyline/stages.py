"""The stages of a seed's life and the transitions between them."""

from enum import IntEnum


class Stage(IntEnum):
    """The stage of a slot. The numbers are those of the prior system; 0 and 5 are retired."""

    DORMANT = 1
    GERMINATED = 2
    TRAINING = 3
    BLENDING = 4
    HOLDING = 6
    FOSSILISED = 7
    PRUNED = 8
    EMBARGOED = 9
    RESETTING = 10


class Gate(IntEnum):
    """The condition for entering a stage: G0 GERMINATED, G1 TRAINING, G2 BLENDING, G3 HOLDING,
    G5 FOSSILISED. There is no G4."""

    G0 = 0
    G1 = 1
    G2 = 2
    G3 = 3
    G5 = 5


STAGE_COUNT = 11
"""Width of a one-hot vector or lookup table that is indexed by ``Stage``."""

TRANSITIONS: dict[Stage, frozenset[Stage]] = {
    Stage.DORMANT: frozenset({Stage.GERMINATED}),
    Stage.GERMINATED: frozenset({Stage.TRAINING, Stage.PRUNED}),
    Stage.TRAINING: frozenset({Stage.BLENDING, Stage.PRUNED}),
    Stage.BLENDING: frozenset({Stage.HOLDING, Stage.PRUNED}),
    Stage.HOLDING: frozenset({Stage.FOSSILISED, Stage.BLENDING, Stage.PRUNED}),
    Stage.FOSSILISED: frozenset(),
    Stage.PRUNED: frozenset({Stage.EMBARGOED}),
    Stage.EMBARGOED: frozenset({Stage.RESETTING}),
    Stage.RESETTING: frozenset({Stage.DORMANT}),
}
"""The legal next stages of each stage. FOSSILISED is terminal."""

LIVING = (Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING, Stage.FOSSILISED)
"""Stages in which a seed has parameters."""

COMPUTING = (Stage.TRAINING, Stage.BLENDING, Stage.HOLDING, Stage.FOSSILISED)
"""Stages in which a seed takes part in the training pass."""

ACTING = (Stage.BLENDING, Stage.HOLDING, Stage.FOSSILISED)
"""Stages in which a seed may change the host's output, and so pays the price."""

DEVELOPING = (Stage.GERMINATED, Stage.TRAINING, Stage.PRUNED, Stage.EMBARGOED, Stage.RESETTING)
"""With ``Rules.one_at_a_time``, a slot in one of these stages closes gate G0 of its environment."""

PRUNABLE = (Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING)
"""Stages in which a seed can be pruned."""
