"""Glyphs, names and colours. A glyph or a word accompanies every colour."""

from dataclasses import dataclass

from esper.leyline.actions import Op
from esper.leyline.stages import Stage

GLYPHS: dict[int, str] = {
    0: " ",
    Stage.DORMANT: "·",
    Stage.GERMINATED: "○",
    Stage.TRAINING: "◔",
    Stage.BLENDING: "◑",
    Stage.HOLDING: "◕",
    Stage.FOSSILISED: "●",
    Stage.PRUNED: "✕",
    Stage.EMBARGOED: "⊘",
    Stage.RESETTING: "↺",
}
"""Glyph of each stage: a circle that fills up. 0 means that the host lacks the slot."""

OPS: dict[int, str] = {
    Op.WAIT: "wait",
    Op.GERMINATE: "germinate",
    Op.SET_ALPHA_TARGET: "set alpha",
    Op.PRUNE: "prune",
    Op.FOSSILISE: "fossilise",
    Op.ADVANCE: "advance",
}


@dataclass(frozen=True, slots=True)
class Palette:
    """Colours by role, as ``rich`` style strings."""

    stages: dict[int, str]
    good: str
    bad: str
    warning: str
    muted: str
    accent: str
    grown: str
    twin: str
    cursor: str

    def stage(self, stage: int) -> str:
        """Return the style of a stage."""
        return self.stages.get(stage, self.muted)


DARK = Palette(
    stages={
        Stage.GERMINATED: "#7dd3fc",
        Stage.TRAINING: "#facc15",
        Stage.BLENDING: "#fb923c",
        Stage.HOLDING: "#c4a7ff",
        Stage.FOSSILISED: "bold #4ade80",
        Stage.PRUNED: "#f87171",
        Stage.EMBARGOED: "#d3a0a0",
        Stage.RESETTING: "#a3b1c4",
    },
    good="#4ade80",
    bad="bold #ff7b72",
    warning="#facc15",
    muted="#9da7b1",
    accent="bold #7dd3fc",
    grown="#4ade80",
    twin="#8fb3ff",
    cursor="on #2d3f55",
)

LIGHT = Palette(
    stages={
        Stage.GERMINATED: "#075985",
        Stage.TRAINING: "#6b4b00",
        Stage.BLENDING: "#8f3f05",
        Stage.HOLDING: "#5b21b6",
        Stage.FOSSILISED: "bold #14532d",
        Stage.PRUNED: "#991b1b",
        Stage.EMBARGOED: "#6b3c3c",
        Stage.RESETTING: "#3f4a5a",
    },
    good="#14532d",
    bad="bold #991b1b",
    warning="#6b4b00",
    muted="#474f59",
    accent="bold #075985",
    grown="#14532d",
    twin="#1e40af",
    cursor="on #cfe0f2",
)


def stage_name(stage: int) -> str:
    """Return the name of a stage."""
    try:
        return Stage(stage).name.lower()
    except ValueError:
        return "no slot" if stage == 0 else f"stage {stage}"


def op_name(op: int) -> str:
    """Return the name of an operation."""
    return OPS.get(op, f"op {op}")
