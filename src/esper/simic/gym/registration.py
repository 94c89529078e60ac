"""Esper's environments in the registry of Gymnasium, under ``esper/``."""

from typing import Any

import gymnasium

from esper.runtime import tasks

GROWTH = "esper.simic.tools.growth_vector"
MEMORY = "esper.simic.gym.memory_tasks"


def register_envs() -> None:
    """Register Esper's environments with Gymnasium, for ``gymnasium.make`` and ``make_vec``.

    ``esper/NAME-v0`` is the growth of networks on the task or suite NAME, also of those that a
    plugin defined before the call; ``esper/MaskedCartPole-v0`` and ``esper/MemoryChain-v0`` are
    tasks for policies with a memory.
    """
    for name in (*tasks.TASKS, *tasks.SUITES):
        _register(
            name, f"{GROWTH}:GrowthSingleEnv", f"{GROWTH}:GrowthVectorEnv", kwargs={"task": name}
        )
    single = f"{MEMORY}:masked_cart_pole"
    _register("MaskedCartPole", single, max_episode_steps=500, reward_threshold=450.0)
    _register("MemoryChain", f"{MEMORY}:MemoryChain", reward_threshold=0.9)


def _register(name: str, single: str, vector: str | None = None, **more: Any) -> None:
    identity = f"esper/{name}-v0"
    if identity not in gymnasium.registry:
        gymnasium.register(identity, single, vector_entry_point=vector, **more)
