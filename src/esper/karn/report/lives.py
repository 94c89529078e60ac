"""Lives of seeds, reconstructed from their stage changes."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from esper.leyline.events import SeedStageChanged

SEED_OUTCOMES: Final = ("fossilised", "unfinished", "pruned", "rolled back")
"""How a seed ends: kept for good; alive when the episode ended; pruned, by the policy or by a
rollback; removed, but never recorded as PRUNED."""

_ENDINGS: Final = {"PRUNED": "pruned", "DORMANT": "rolled back"}
_AFTERWARDS: Final = ("EMBARGOED", "RESETTING")


@dataclass(slots=True)
class SeedLife:
    """One seed of one episode.

    Attributes:
        environment: the environment it grew in.
        slot: index of the slot in the host.
        blueprint: name of its blueprint.
        stages: (first step, name) of each stage, in order.
        end: step at which it was removed; None while it is alive.
        outcome: one of ``SEED_OUTCOMES``.
    """

    environment: int
    slot: int
    blueprint: str
    stages: list[tuple[int, str]]
    end: int | None = None
    outcome: str = "unfinished"

    @property
    def birth(self) -> int:
        """Step of germination."""
        return self.stages[0][0]


class SeedKey(NamedTuple):
    """The key by which seeds are counted; ``step`` is the step of germination."""

    task: str
    slot: int
    blueprint: str
    step: int
    outcome: str


@dataclass(slots=True)
class LifeBook:
    """Counts of seeds per completed round, and the lives of seeds in the last one.

    Attributes:
        seed_counts: number of seeds per ``SeedKey``, by round.
        last: lives of the seeds in the last completed round.
    """

    seed_counts: dict[int, Counter[SeedKey]] = field(default_factory=dict)
    last: list[SeedLife] = field(default_factory=list)
    _lives: list[SeedLife] = field(default_factory=list)
    _living: dict[tuple[int, int], SeedLife] = field(default_factory=dict)

    def change(self, event: SeedStageChanged) -> None:
        """Record the stage changes of one step."""
        slots = zip(event.environment, event.slot, strict=True)
        for slot, blueprint, stage in zip(slots, event.blueprint, event.stage, strict=True):
            if stage == "GERMINATED":
                life = SeedLife(*slot, blueprint, [(event.step, stage)])
                self._living[slot] = life
                self._lives.append(life)
            elif stage in _ENDINGS and slot in self._living:
                life = self._living.pop(slot)
                life.end, life.outcome = event.step, _ENDINGS[stage]
            elif stage not in _AFTERWARDS and slot in self._living:
                self._living[slot].stages.append((event.step, stage))

    def end_round(self, round_number: int, tasks: list[str]) -> None:
        """Count the seeds of a round that has ended; ``tasks`` has the task of each environment."""
        for life in self._living.values():
            if life.stages[-1][1] == "FOSSILISED":
                life.outcome = "fossilised"
        self.seed_counts[round_number] = Counter(
            SeedKey(tasks[life.environment], life.slot, life.blueprint, life.birth, life.outcome)
            for life in self._lives
        )
        self.last = self._lives
        self.begin_round()

    def begin_round(self) -> None:
        """Start a new round; discard the lives of a round that was not completed."""
        self._lives, self._living = [], {}
