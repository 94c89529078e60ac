"""The policy ``rule``: try and keep, or try in turn where one seed may live."""

from collections.abc import Callable, Sequence

from torch import Tensor

from esper.kasmina.slots import SlotSpec
from esper.tamiyo.policy.features import Observation
from esper.tamiyo.try_and_keep import OF_TASKS, RuleSettings, TryAndKeepActor, trial_of
from esper.tamiyo.try_in_turn import TryInTurnActor, turns_of


class RuleActor:
    """Tries a seed in every slot and keeps all that pay their price.

    Of the variants of try-and-keep the one with ``OF_TASKS`` is best on the family ``adaptation``.
    Where only one seed may live, it tries the last slot, then the others from the first on, and
    keeps the first seed that pays.

    Args:
        slots: returns the slots of each environment's host in the current episode.
        episode_length: steps per episode.
        max_seeds: limit of living seeds per environment; None without a limit.
        settings: what it plants and when it decides; where one seed may live, it plants the
            smallest.
    """

    def __init__(
        self,
        slots: Callable[[], Sequence[Sequence[SlotSpec]]],
        episode_length: int,
        max_seeds: int | None = None,
        settings: RuleSettings = OF_TASKS,
    ):
        self.slots, self.episode_length = slots, episode_length
        self.max_seeds, self.settings = max_seeds, settings

    def begin(self, environments: Tensor, episode: int) -> None:
        """See ``baselines.Actor.begin``."""
        self._environments, self._episode = environments, episode
        self._first = True

    def act(self, observation: Observation, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """See ``baselines.Actor.act``. Hosts are known only after ``begin``."""
        if self._first:
            self._first, self._actor = False, self._actor_for(observation.slots.shape[1])
            self._actor.begin(self._environments, self._episode)
        return self._actor.act(observation, step)

    def _actor_for(self, width: int) -> TryAndKeepActor | TryInTurnActor:
        if self.max_seeds == 1 < width:
            return TryInTurnActor(turns_of(self.slots(), width, self.episode_length))
        return TryAndKeepActor(trial_of(self.slots(), width, self.episode_length, self.settings))
