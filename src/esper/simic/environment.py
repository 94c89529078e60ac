"""The growth environment: N hosts in training as one environment of tensors.

Each group of environments draws its task for an episode. Environments whose hosts have one shape
share a stack (``simic.shard``); the shards are dealt over CPU threads, and what they say is put
together in the order of the environments. All N run in lockstep and end together.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache, partial
from typing import TypeVar

import torch
from torch import Tensor

from esper.kasmina.rng import Purpose, random_bits
from esper.runtime.tasks import Task
from esper.simic.merge import merged
from esper.simic.rewards import REWARD_MODES
from esper.simic.shard import Shard
from esper.simic.step import GrowthConfig, Step
from esper.tamiyo.policy.features import Observation
from esper.tolaria.backends import Backend
from esper.tolaria.backends.choice import choose_backend
from esper.tolaria.backends.trial import tried
from esper.tolaria.bank import DataBank, StackKey
from esper.tolaria.precision import Precision
from esper.tolaria.scaler import LossScales, ScaleTable

_T = TypeVar("_T")

MOST_ROWS = 300
"""Environments of a shard of the torch backend on a CPU: with more, what all of them have in
flight at once no longer fits into the cache, and each costs half as much again."""


@dataclass(frozen=True, slots=True)
class MixedPrecision:
    """In which precision hosts are computed, and how their loss scales stand.

    Attributes:
        enabled: whether in mixed precision.
        dtype: ``bfloat16`` or ``float16``, None when not enabled.
        mean_scale, least_scale: over the environments; None where losses are not scaled.
        skipped: minibatches in which an update was skipped since the run began, of all
            environments together; None where losses are not scaled.
    """

    enabled: bool
    dtype: str | None
    mean_scale: float | None = None
    least_scale: float | None = None
    skipped: int | None = None


class GrowthEnv:
    """N environments of one or more tasks.

    Args:
        tasks: what they train; each group draws one of them for every episode.
        environments: identities, int64 ``[N]``. The numbers of an environment depend on its
            identity and actions alone, so any subset replays the same trajectories.
        config: see ``GrowthConfig``.
        precision: of the hosts' arithmetic; float32 where a trial of it fails.
        device: where everything lives.

    Attributes:
        precision: in effect.
        scales: of the losses, environments first and then twins by group; None where losses are
            not scaled. They go from episode to episode with their environment, whatever its task.
        task_of: index in ``tasks`` of each environment's task in this episode, int64 ``[N]``.

    Raises:
        ValueError: the reward has no such mode, or there is no task.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        environments: Tensor,
        config: GrowthConfig,
        precision: Precision,
        device: torch.device,
    ):
        if config.reward not in REWARD_MODES:
            raise ValueError(f"reward must be one of {REWARD_MODES}, got {config.reward!r}")
        if not tasks:
            raise ValueError("there must be a task")
        self.tasks, self.config, self.device = tuple(tasks), config, device
        self.environments = environments.to(device)
        self.count: int = len(environments)
        self.groups = self.environments // config.group_size
        data = [(task, task.datasets()) for task in self.tasks]
        keys = [StackKey.of(*pair) for pair in data]
        self.banks = {
            key: DataBank(
                [pair for pair, k in zip(data, keys, strict=True) if k == key],
                config.dtype,
                device,
            )
            for key in dict.fromkeys(keys)
        }
        hosts = [bank.tasks[0].host for bank in self.banks.values()]
        self.precision = tried(precision, hosts, config.dtype, device)
        self.backends: dict[StackKey, Backend] = {
            key: choose_backend(
                config.backend,
                bank.tasks[0].host,
                self.precision,
                config.dtype,
                device,
                config.threads,
            )
            for key, bank in self.banks.items()
        }
        kinds = list(self.banks)
        self._bank_of = torch.tensor([kinds.index(key) for key in keys], device=device)
        self._place = torch.tensor(
            [self.banks[k].tasks.index(t) for t, k in zip(self.tasks, keys, strict=True)],
            device=device,
        )
        self.slot_count = max(len(task.host.slots) for task in self.tasks)
        self._pool = _workers(config.threads) if config.threads > 1 else None
        self._dealt: Tensor | None = None
        self.twin_groups = torch.unique(self.groups)
        rows = self.count + len(self.twin_groups)
        self.scales = ScaleTable.fresh(rows, device) if self.precision.scaled else None
        self._outlives = self.scales.state() if self.scales else {}

    @property
    def amp(self) -> MixedPrecision:
        """Precision and loss scales as they stand, for telemetry; one transfer from the device."""
        enabled, dtype = self.precision.enabled, self.precision.dtype_name
        if self.scales is None:
            return MixedPrecision(enabled, dtype)
        scale, skipped = self.scales.scale[: self.count], self.scales.skipped[: self.count]
        numbers = torch.stack([scale.mean(), scale.min(), skipped.sum().float()])
        mean, least, count = numbers.tolist()
        return MixedPrecision(enabled, dtype, mean, least, int(count))

    def state(self) -> dict[str, Tensor]:
        """What outlives an episode, for a checkpoint; an episode that is cut short leaves nothing.

        The loss scales of the N environments and then of their twins by group, as they were after
        the last whole episode; empty where losses are not scaled.
        """
        return dict(self._outlives)

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take up what ``state`` gave.

        Scales this precision has no use for are left aside, and where it needs some and the state
        has none, they stay as they are.

        Raises:
            UsageError: the state is of another number of environments.
        """
        if self.scales is not None and state:
            self.scales.load(state)
            self._outlives = self.scales.state()

    @property
    def backend_name(self) -> str:
        """What computes the hosts; ``native and torch`` where hosts of some shapes need torch."""
        return " and ".join(sorted({backend.name for backend in self.backends.values()}))

    def reset(self, episode: int) -> Observation:
        """Begin episode number ``episode`` with fresh hosts."""
        if self.scales is not None:
            self.scales.load(self._outlives)
        self.task_of = self._draw(episode)
        if self._dealt is None or not torch.equal(self._dealt, self.task_of):
            self._deal()
        return self._merge(self._each([partial(shard.reset, episode) for shard in self.shards]))

    def step(self, actions: Tensor) -> Step:
        """One environment step for all.

        Args:
            actions: int64 ``[N, heads]``. An illegal action changes nothing; see
                ``StepReport.success``.
        """
        calls = [
            partial(shard.step, actions[rows])
            for shard, rows in zip(self.shards, self.rows, strict=True)
        ]
        step = self._merge(self._each(calls))
        if step.done and self.scales is not None:
            self._outlives = self.scales.state()
        return step

    def _draw(self, episode: int) -> Tensor:
        """The task of each environment: consecutive groups get different ones, in random order."""
        bits = random_bits(
            self.config.seed,
            torch.tensor([episode], device=self.device),
            Purpose.TASK,
            0,
            0,
            len(self.tasks),
        )
        return bits[0].argsort()[self.groups % len(self.tasks)]

    def _deal(self) -> None:
        """Cut the environments into shards: by bank, and each bank's groups over the threads."""
        self._dealt = self.task_of
        banks = self._bank_of[self.task_of]
        self.shards: list[Shard] = []
        self.rows: list[Tensor] = []
        for number, (key, bank) in enumerate(self.banks.items()):
            rows = (banks == number).nonzero()[:, 0]
            if len(rows) == 0:
                continue
            rows = rows[self.groups[rows].argsort(stable=True)]
            runs = torch.unique_consecutive(self.groups[rows], return_counts=True)[1].tolist()
            backend = self.backends[key]
            for mine in rows.split(_cut(runs, self._parts(backend, len(rows)))):
                place = self._place[self.task_of[mine]]
                self.shards.append(
                    Shard(
                        bank,
                        self.environments[mine],
                        place,
                        self.config,
                        backend,
                        self._scales_of(mine),
                    )
                )
                self.rows.append(mine)
        together = torch.cat(self.rows)
        self._order = together.argsort()
        self._in_order = torch.equal(self._order, torch.arange(self.count, device=self.device))

    def _scales_of(self, rows: Tensor) -> LossScales | None:
        """The loss scales of some environments and then of their twins."""
        if self.scales is None:
            return None
        twins = torch.searchsorted(self.twin_groups, torch.unique(self.groups[rows]))
        return LossScales(self.scales, torch.cat([rows, self.count + twins]))

    def _parts(self, backend: Backend, rows: int) -> int:
        """Into how many shards so many environments of a bank are cut."""
        if backend.threaded or self.device.type != "cpu":
            return 1
        return max(self.config.threads, -(-rows // MOST_ROWS))

    def _each(self, calls: Sequence[Callable[[], _T]]) -> list[_T]:
        """Every call, the longest first, in the lanes.

        Shards that use all threads by themselves one after another.
        """
        if self._pool is None or len(calls) == 1:
            return [call() for call in calls]
        threaded = [shard.engine.backend.threaded for shard in self.shards]
        longest_first = sorted(range(len(calls)), key=lambda i: -self.shards[i].cost)
        futures = {i: self._pool.submit(calls[i]) for i in longest_first if not threaded[i]}
        wait(futures.values())  # so that nothing still moves when one of them has failed
        return [call() if threaded[i] else futures[i].result() for i, call in enumerate(calls)]

    def _merge(self, parts: list[_T]) -> _T:
        """One answer in the order of the environments."""
        if len(parts) == 1 and self._in_order:
            return parts[0]
        answer: _T = merged(parts, self._order)
        return answer


@cache
def _workers(lanes: int) -> ThreadPoolExecutor:
    """Threads for shards. Each computes by itself: many small operations gain nothing from being
    cut up, and lose at every barrier."""
    return ThreadPoolExecutor(lanes, "lane", torch.set_num_threads, (1,))


def _cut(runs: list[int], parts: int) -> list[int]:
    """Sizes of ``parts`` or fewer parts of about equal size, each of whole consecutive runs."""
    total, sizes, filled = sum(runs), [0] * parts, 0
    for run in runs:
        sizes[min(parts - 1, (filled + run // 2) * parts // total)] += run
        filled += run
    return [size for size in sizes if size]
