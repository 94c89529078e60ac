"""What became of seeds, followed from one change of stage to the next."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from esper.leyline.events import SeedStageChanged

FATES: Final = ("fossilised", "unfinished", "pruned", "rolled back")
"""How a life ends: kept for good; alive when the episode ended; removed by the policy; undone when
the governor put the host back."""

_GONE: Final = {"PRUNED": "pruned", "DORMANT": "rolled back"}
_AFTERWARDS: Final = ("EMBARGOED", "RESETTING")


@dataclass(slots=True)
class SeedLife:
    """One seed of one episode.

    Attributes:
        environment: where it lived.
        slot: index in its host.
        blueprint: its name.
        stages: stages and the step at which each began.
        end: step at which it ended; None while it lives.
        fate: one of ``FATES``.
    """

    environment: int
    slot: int
    blueprint: str
    stages: list[tuple[int, str]]
    end: int | None = None
    fate: str = "unfinished"

    @property
    def born(self) -> int:
        """Step of germination."""
        return self.stages[0][0]


class Birth(NamedTuple):
    """What is counted: where, what and when was germinated, and what became of it."""

    task: str
    slot: int
    blueprint: str
    step: int
    fate: str


@dataclass(slots=True)
class LifeBook:
    """Lives of the round that goes on; counts of all whole rounds, lives of the last of them."""

    births: dict[int, Counter[Birth]] = field(default_factory=dict)
    last: list[SeedLife] = field(default_factory=list)
    _lives: list[SeedLife] = field(default_factory=list)
    _living: dict[tuple[int, int], SeedLife] = field(default_factory=dict)

    def change(self, event: SeedStageChanged) -> None:
        """Take in what changed in one step."""
        places = zip(event.environment, event.slot, strict=True)
        for place, blueprint, stage in zip(places, event.blueprint, event.stage, strict=True):
            if stage == "GERMINATED":
                life = SeedLife(*place, blueprint, [(event.step, stage)])
                self._living[place] = life
                self._lives.append(life)
            elif stage in _GONE and place in self._living:
                life = self._living.pop(place)
                life.end, life.fate = event.step, _GONE[stage]
            elif stage not in _AFTERWARDS and place in self._living:
                self._living[place].stages.append((event.step, stage))

    def end_round(self, round_number: int, tasks: list[str]) -> None:
        """The round is over; ``tasks`` holds the task of each environment."""
        for life in self._living.values():
            if life.stages[-1][1] == "FOSSILISED":
                life.fate = "fossilised"
        self.births[round_number] = Counter(
            Birth(tasks[life.environment], life.slot, life.blueprint, life.born, life.fate)
            for life in self._lives
        )
        self.last = self._lives
        self.begin_round()

    def begin_round(self) -> None:
        """Forget a round that did not end."""
        self._lives, self._living = [], {}
