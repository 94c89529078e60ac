"""Gymnasium environments in a process each, by Gymnasium's own ``AsyncVectorEnv``."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from gymnasium.vector.async_vector_env import _async_worker

from esper.leyline.errors import UsageError
from esper.simic.gym.action_spaces import Choices
from esper.simic.gym.lockstep import Environments
from esper.simic.gym.vector_environment import GymEnvironments

FAULT = "fault"
ENDED = "gym: the process of an environment ended; see its output"


class Worker(gymnasium.Env[Any, Any]):
    """One environment as numbers: what it observes is features, then masks; it resets itself.

    Faults are results, because a process that raises prints a traceback.

    Args:
        make: makes the environment, in whatever process.
        process: the process whose signals are the user's.
    """

    def __init__(self, make: Callable[[], GymEnvironments], process: int):
        if os.getpid() != process:
            # Ctrl-C reaches every process of a terminal; the first ends the others when it is done.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.one = one = make()
        self.columns = len(one.actions.options) + one.actions.components
        self.kind = np.float32 if one.actions.components else np.int64
        width = one.shape.inputs + one.observation.masks[0].numel()
        self.observation_space = spaces.Box(-np.inf, np.inf, (width,), np.float32)
        self.action_space = spaces.Box(-np.inf, np.inf, (self.columns,), np.float64)
        self.checkpoint: dict[str, Any] = {}

    def _row(self) -> Any:
        one = self.one.observation
        return np.concatenate([one.features.numpy()[0], one.masks.numpy()[0].reshape(-1)])

    def _attempt(self, call: Callable[[], None]) -> dict[str, Any]:
        try:
            call()
        except UsageError as error:
            return {FAULT: str(error)}
        return {}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin the first episode."""
        info = self._attempt(self.one.reset)
        return self._row(), info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take a step, or begin the next episode."""
        info = self._attempt(lambda: self.one.step(action[None].astype(self.kind)))
        one = self.one
        flags = bool(one.terminated[0]), bool(one.truncated[0] and not one.terminated[0])
        return self._row(), float(one.reward[0]), *flags, info

    def close(self) -> None:
        """Close the environment."""
        self.one.close()

    def state(self) -> dict[str, Any]:
        """See ``GymEnvironments.state``, as arrays."""
        return {name: x.numpy() for name, x in self.one.state().items()}

    def load(self) -> tuple[Any, bool, float, int, dict[str, Any]]:
        """Restore ``checkpoint``; returns row, whether it is over, return, length and faults."""
        state = {name: torch.from_numpy(x) for name, x in self.checkpoint.items()}
        info, one = self._attempt(lambda: self.one.load(state)), self.one
        return self._row(), bool(one.over[0]), float(one.returns[0]), int(one.lengths[0]), info


def serve(*arguments: Any) -> None:
    """Gymnasium's loop of a process, which ends without a word when the first process is killed."""
    with suppress(EOFError, OSError):
        _async_worker(*arguments)


class ProcessEnvironments(Environments):
    """Environments in a process each; their bits are those of ``GymEnvironments``.

    Args:
        makers: make each environment, in its process and once in this one.
        seed, first, limit: see ``Environments``.

    Raises:
        UsageError: Esper does not support a space, or a process ends.
    """

    def __init__(
        self, makers: Sequence[Callable[[], GymEnvironments]], seed: int, first: int, limit: int
    ):
        one = makers[0]()
        super().__init__(one.shape, one.actions, len(makers), seed, first, limit)
        one.close()
        methods = multiprocessing.get_all_start_methods()
        method = "forkserver" if "forkserver" in methods else "spawn"
        # A fork of this process, whose threads compute, could wait for a lock for ever. What the
        # makers need is imported once, and not by each process.
        needed = {getattr(make, "func", make).__module__ for make in makers}
        multiprocessing.get_context(method).set_forkserver_preload([__name__, *sorted(needed)])
        workers = [partial(Worker, make, os.getpid()) for make in makers]
        try:
            self._envs = AsyncVectorEnv(
                workers, context=method, worker=serve, autoreset_mode=AutoresetMode.DISABLED
            )
        except (EOFError, OSError) as error:
            raise UsageError(ENDED) from error

    def reset(self) -> None:
        """See ``Environments.reset``."""
        rows, info = self._result(self._envs.reset)
        self._raise(info)
        self._begin_all()
        self._write(rows)

    def step(self, choices: Choices) -> None:
        """See ``Environments.step``."""
        actions = choices.astype(np.float64)
        rows, reward, terminated, truncated, info = self._result(lambda: self._envs.step(actions))
        self._raise(info)
        self._note(reward, terminated, truncated)
        self._write(rows)

    def _result(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (EOFError, OSError) as error:
            # The others would be waited for, although nothing answers any more.
            for process in self._envs.processes:
                process.kill()
                process.join()
            self._envs.closed = True
            raise UsageError(ENDED) from error

    def _raise(self, info: dict[str, Any]) -> None:
        """Raise the first fault of a step."""
        for i, fault in enumerate(info.get(FAULT, ())):
            if fault:
                raise UsageError(str(fault).replace("environment 0", f"environment {i}", 1))

    def _write(self, rows: Any) -> None:
        inputs = self.shape.inputs
        self._features[:] = rows[:, :inputs]
        self._masks[:] = rows[:, inputs:].reshape(self._masks.shape)

    def close(self) -> None:
        """See ``Environments.close``."""
        self._envs.close()

    def state(self) -> dict[str, torch.Tensor]:
        """See ``GymEnvironments.state``."""
        each = self._result(lambda: self._envs.call("state"))
        return {
            name: torch.from_numpy(np.concatenate([one[name] for one in each])) for name in each[0]
        }

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """See ``Environments.load``."""
        if len(state["lengths"]) != self.count or state["features"].shape != self._features.shape:
            raise ValueError("the environments differ")
        actions = state["actions"].split(state["lengths"].tolist())
        parts = [
            {name: x[i : i + 1].numpy() for name, x in state.items()}
            | {"actions": actions[i].numpy()}
            for i in range(self.count)
        ]
        self._envs.set_attr("checkpoint", parts)
        rows, over, returns, lengths, infos = zip(
            *self._result(lambda: self._envs.call("load")), strict=True
        )
        self._raise({FAULT: [info.get(FAULT) for info in infos]})
        self._begin_all()
        self._write(np.stack(rows))
        self.over, self.returns = np.array(over), np.array(returns)
        self.lengths = np.array(lengths)
