"""Feed of recent events (germinations, fossilisations, rollbacks, ...), newest first."""

from collections.abc import Iterator
from itertools import islice

from rich.text import Text

from esper.karn.sanctum.palette import GLYPHS, Palette
from esper.karn.sanctum.snapshot import Moment
from esper.leyline.events import (
    CheckpointSaved,
    GovernorRollback,
    SeedEvent,
    SeedFossilized,
    SeedGerminated,
    SeedPruned,
)
from esper.leyline.stages import Stage

_SEEDS: tuple[tuple[type[SeedEvent], Stage, str], ...] = (
    (SeedGerminated, Stage.GERMINATED, "germinated"),
    (SeedFossilized, Stage.FOSSILISED, "fossilised"),
    (SeedPruned, Stage.PRUNED, "pruned"),
)


def feed(moment: Moment, lines: int, palette: Palette) -> Text:
    """Return the latest ``lines`` events as text, one per line."""
    found: list[tuple[float, Text]] = []
    for kind, stage, word in _SEEDS:
        for event in islice(reversed(moment.events(kind)), lines):
            found += [(event.time, line) for line in _seeds(moment, event, stage, word, palette)]
    for rollback in islice(reversed(moment.events(GovernorRollback)), lines):
        names = " ".join(map(str, rollback.environment))
        line = Text(f"{_when(rollback)} env {names} ↩ rolled back", style=palette.bad)
        found.append((rollback.time, line))
    for saved in islice(reversed(moment.events(CheckpointSaved)), lines):
        line = Text(f"r{saved.round:<9} ⇩ checkpoint", style=palette.muted)
        found.append((saved.time, line))
    found.sort(key=lambda item: -item[0])
    return Text("\n", no_wrap=True, overflow="ellipsis").join(t for _, t in found[:lines])


def _seeds(
    moment: Moment, event: SeedEvent, stage: Stage, word: str, palette: Palette
) -> Iterator[Text]:
    for environment, slot, blueprint in zip(
        event.environment, event.slot, event.blueprint, strict=True
    ):
        line = Text(f"{_when(event)} env {environment:<3} ")
        line.append(f"{GLYPHS[stage]} {word}", style=palette.stage(stage))
        name = moment.slot_names(environment, slot + 1, event.round)[slot]
        yield line.append(f" {blueprint} in {name}")


def _when(event: SeedEvent | GovernorRollback) -> str:
    return f"r{event.round} s{event.step}".ljust(10)
