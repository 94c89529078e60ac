"""How much memory a run needs at least, and how much there is."""

import json
import resource
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from esper.leyline.config.groups import TrainConfig
from esper.leyline.errors import UsageError

TASK_NEEDS = Path(__file__).with_name("task_needs.json")
"""Bytes of a host and steps of an episode of each built-in task. A test compares them with the
tasks; with this table a request is answered before torch is imported."""

ENVIRONMENT_BYTES = 75_000
"""Bytes that an environment takes besides its host and its steps, measured likewise on
``digits_shift`` and ``digits``: batches, scores and the state of its slots."""

STEP_BYTES = 36
"""Bytes that an environment step takes until the end of the update, per unit of the LSTM, measured
on ``digits_shift`` with the default settings: rollout, sequences and activations."""

GIB = 2**30
_FLOAT = 4
_COPIES = 4
"""Weights, gradients and the two moments of Adam."""


def check_memory(config: TrainConfig) -> None:
    """Refuse a run on a CPU whose policy or hosts alone need more memory than there is.

    Raises:
        UsageError: names the setting, what it needs, what there is and what would fit.
    """
    if set(config.machine.devices) != {"cpu"}:
        return
    width = config.learner.lstm_hidden
    check_fits("lstm_hidden", width, policy_bytes(width), power=2)
    world, table = config.world, task_needs()
    if config.gymnasium.gym is None and all(name in table for name in world.task):
        needs = [table[name] for name in world.task]
        steps = world.episode_length or min(need.episode_length for need in needs)
        hosts = sum(need.host_bytes for need in needs) / len(needs)
        check_environments(config, hosts, steps)


def check_environments(
    config: TrainConfig, host_bytes: float, steps: int, envs: int | None = None
) -> None:
    """Refuse more environments than fit into memory.

    Every group of environments has a never-grow twin; groups take turns with the tasks.

    Args:
        config: settings of the run.
        host_bytes: bytes of a host, the mean over the tasks; see ``tolaria.memory.stored_bytes``.
        steps: steps of an episode.
        envs: environments of this process, those of the settings if None.

    Raises:
        UsageError: see ``check_memory``.
    """
    envs = config.world.envs if envs is None else envs
    rows = envs + -(-envs // config.world.group_size)
    steps_bytes = STEP_BYTES * config.learner.lstm_hidden * steps
    check_fits("envs", envs, rows * host_bytes + envs * (ENVIRONMENT_BYTES + steps_bytes))


def check_fits(setting: str, value: int, need: float, power: int = 1) -> None:
    """Refuse ``value`` of a setting if it needs more memory than there is.

    Args:
        setting: its name.
        value: what was asked for.
        need: bytes that it needs at least.
        power: the power of the value with which the need grows.

    Raises:
        UsageError: see ``check_memory``.
    """
    available = available_memory()
    if available is None or need <= available:
        return
    fits = int(value * (available / need) ** (1 / power))
    advice = f"about {fits} fit" if fits > 0 else "not even one fits"
    raise UsageError(
        f"{setting}: {value} need at least {need / GIB:.1f} GiB of memory, and "
        f"{available / GIB:.1f} GiB are available; {advice}"
    )


def policy_bytes(lstm_hidden: int) -> float:
    """Bytes that the LSTM of a policy takes while it learns; the other layers are far smaller."""
    return 8.0 * lstm_hidden * (lstm_hidden + 1) * _FLOAT * _COPIES


class TaskMemory(NamedTuple):
    """What the estimate needs to know of a task."""

    host_bytes: int
    """See ``check_environments``."""
    episode_length: int
    """Steps of its episodes."""


@cache
def task_needs() -> dict[str, TaskMemory]:
    """The built-in tasks by name, as in ``TASK_NEEDS``."""
    table = json.loads(TASK_NEEDS.read_text(encoding="utf-8"))
    return {name: TaskMemory(*numbers) for name, numbers in table.items()}


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes that this process may still take; None where the system does not tell.

    The least of what the machine has, what the control groups of a container leave, and what the
    limit of this process allows.
    """
    limits = [*_machine(root), *_control_groups(root)]
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        limits.append(limit)
    return min(limits, default=None)


def _machine(root: Path) -> Iterator[int]:
    with suppress(OSError, ValueError, IndexError):
        text = (root / "proc/meminfo").read_text()
        yield int(text.split("MemAvailable:")[1].split()[0]) * 1024


def _control_groups(root: Path) -> Iterator[int]:
    """What the memory controllers of versions 1 and 2 leave, in every group around the process."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, inside = line.split(":", 2)
            version_2 = not controllers
            if not version_2 and "memory" not in controllers.split(","):
                continue
            names = (
                ("memory.max", "memory.current")
                if version_2
                else ("memory.limit_in_bytes", "memory.usage_in_bytes")
            )
            base = root / "sys/fs/cgroup" / ("" if version_2 else "memory")
            group = base / inside.lstrip("/")
            for folder in (group, *group.parents):
                if not folder.is_relative_to(base):
                    break
                with suppress(OSError, ValueError):
                    limit, usage = (int((folder / name).read_text()) for name in names)
                    yield max(0, limit - usage + _reclaimable(folder))


def _reclaimable(folder: Path) -> int:
    """Cached files that the system would drop before it refuses memory."""
    with suppress(OSError, ValueError):
        pairs = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
        statistics = {pair[0]: int(pair[1]) for pair in pairs}
        return statistics.get("inactive_file", statistics.get("total_inactive_file", 0))
    return 0
