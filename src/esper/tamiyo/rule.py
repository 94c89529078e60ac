"""The rule of the command line: try and keep, or try in turn where one seed may live."""

from collections.abc import Callable, Sequence

from torch import Tensor

from esper.runtime.tasks import Task
from esper.tamiyo.policy.features import Observation
from esper.tamiyo.try_and_keep import TryAndKeepActor, smallest_trial
from esper.tamiyo.try_in_turn import TryInTurnActor, turns_of


class RuleActor:
    """Tries the smallest seed of every slot from the start and keeps all that pay their price.

    Of the variants of try-and-keep this one is best on the family ``adaptation``. Where only one
    seed may live, it tries the last slot, then the others from the first on, and keeps the first
    seed that pays.

    Args:
        tasks: returns the task of each environment in the current episode.
        episode_length: steps per episode.
        max_seeds: limit of living seeds per environment; None without a limit.
    """

    def __init__(
        self,
        tasks: Callable[[], Sequence[Task]],
        episode_length: int,
        max_seeds: int | None = None,
    ):
        self.tasks, self.episode_length, self.max_seeds = tasks, episode_length, max_seeds

    def begin(self, environments: Tensor, episode: int) -> None:
        """See ``baselines.Actor.begin``."""
        self._environments, self._episode = environments, episode

    def act(self, observation: Observation, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """See ``baselines.Actor.act``. Tasks are known only after ``begin``."""
        if step == 0:
            self._actor = self._made(observation.slots.shape[1])
            self._actor.begin(self._environments, self._episode)
        return self._actor.act(observation, step)

    def _made(self, slots: int) -> TryAndKeepActor | TryInTurnActor:
        if self.max_seeds == 1 < slots:
            return TryInTurnActor(turns_of(self.tasks(), slots, self.episode_length))
        return TryAndKeepActor(smallest_trial(self.tasks(), slots, self.episode_length))
