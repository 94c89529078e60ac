"""An actor whose policy is older than the learner's, as in a distributed actor-learner."""

import copy
from collections import deque
from typing import Any, Generic

from esper.simic.actor import PolicyActor, load_snapshot, snapshot
from esper.tamiyo.policy.interface import ObservationT


class LaggedActor(Generic[ObservationT]):
    """Copies of a policy and its moments as they were after each of the last updates.

    The lag is artificial: it reproduces in one process, deterministically, what actors in other
    processes see when their weights arrive late.

    Args:
        learner: the actor with the weights that the updates change.
        lag: number of updates L by which the actor is behind, at least 1. In the first L rounds it
            acts with the initial weights.

    Attributes:
        actor: acts with the weights and moments of L updates ago.
    """

    def __init__(self, learner: PolicyActor[ObservationT], lag: int):
        assert lag > 0, "without a lag the learner itself acts"
        self._learner, self._lag = learner, lag
        policy, moments = copy.deepcopy((learner.policy, learner.moments))
        self.actor = learner.acting_with(policy, moments)
        self._waiting: deque[dict[str, Any]] = deque()

    def note_update(self) -> None:
        """Store what an update left, and move the actor forward by one update if it is due."""
        self._waiting.append(snapshot(self._learner))
        if len(self._waiting) > self._lag:
            load_snapshot(self.actor, self._waiting.popleft())

    def state(self) -> dict[str, Any]:
        """The weights and moments of the actor and of those that wait, oldest first."""
        acting = snapshot(self.actor)
        return {str(i): parts for i, parts in enumerate([acting, *self._waiting])}

    def load(self, state: dict[str, Any]) -> None:
        """Restore what ``state`` returned.

        Raises:
            RuntimeError, ValueError, KeyError: the state is that of another network.
        """
        oldest, *waiting = (state[str(i)] for i in range(len(state)))
        load_snapshot(self.actor, oldest)
        self._waiting = deque(copy.deepcopy(waiting))
