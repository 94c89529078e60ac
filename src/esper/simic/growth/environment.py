"""The growth environment: N hosts in training as one vectorised environment.

Each group of environments draws its task for an episode. Environments are distributed over devices;
on each device those whose tasks have the same ``StackKey`` share a stack (``simic.growth.shard``).
Shards on a CPU run on several threads. Their results are merged on the first device in the order of
the environments. All N environments run in lockstep and end together.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import TypeVar

import torch
from torch import Tensor

from esper.runtime.task import data_digests
from esper.runtime.tasks import Task
from esper.simic.growth.layout import GrowthLayout, cut, merge, span
from esper.simic.growth.rewards import REWARD_MODES
from esper.simic.growth.shard import Shard
from esper.simic.growth.step import GrowthConfig, Step
from esper.tamiyo.policy.features import Observation
from esper.tolaria.backends import Backend
from esper.tolaria.backends.choice import choose_backend, precision_after_trial
from esper.tolaria.bank import DataBank, StackKey
from esper.tolaria.engine import trained_hosts
from esper.tolaria.memory import RowMemory, parts_within, row_memory, rows_at_a_time
from esper.tolaria.precision import LossScales, Precision, ScaleTable

_T = TypeVar("_T")

MAX_ROWS = 300
"""Maximum number of environments per shard of the torch backend on a CPU: with more, the
activations no longer fit into the cache and the time per environment grows by half."""


@dataclass(frozen=True, slots=True)
class MixedPrecision:
    """The precision in which hosts are computed, and the state of their loss scales.

    Attributes:
        enabled: whether hosts are computed in mixed precision.
        dtype: ``bfloat16`` or ``float16``, None if not enabled.
        mean_scale, least_scale: mean and minimum of the environments' loss scales; None if losses
            are not scaled.
        skipped: number of minibatches with a skipped update since the run began, summed over the
            environments; None if losses are not scaled.
    """

    enabled: bool
    dtype: str | None
    mean_scale: float | None = None
    least_scale: float | None = None
    skipped: int | None = None


class ShardError(RuntimeError):
    """A shard failed; the message names the shard, its device, its environments and the cause."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A shard and its place in the environment.

    Attributes:
        device_index: index of its device.
        rows: indices of its environments among all N, int64 ``[n]``.
        twins: its groups that no earlier part has, as indices in ``twin_groups``.
    """

    shard: Shard
    device_index: int
    rows: Tensor
    twins: Tensor


class GrowthEnv(GrowthLayout):
    """N environments of one or more tasks, with their hosts.

    Args:
        tasks: the tasks; each group draws one of them for every episode.
        environments: identities, int64 ``[N]``. The results of an environment depend only on its
            identity and actions, so any subset replays the same trajectories.
        config: see ``GrowthConfig``.
        precision: precision of the hosts' arithmetic; float32 is used if a trial of it fails.
        devices: devices over which the hosts are distributed, at least one, all of one kind; a
            device may be listed more than once. Observations and actions are on the first.
        assignment: index in ``tasks`` of each environment's task in all episodes, int64 ``[N]``,
            equal within a group; None to draw the task of each group anew for every episode.
        digest_data: whether to compute ``data_digests``.

    Attributes:
        data_digests: SHA-256 of the data by ``label`` of the tasks; empty if not computed.
        precision: the precision in effect.
        scales: loss scales, of environments first and then of twins by group; None if losses are
            not scaled. An environment keeps its scale from episode to episode, whatever its task.

    Raises:
        ValueError: the reward mode is unknown, or there is no task or no device.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        environments: Tensor,
        config: GrowthConfig,
        precision: Precision,
        *devices: torch.device,
        assignment: Tensor | None = None,
        digest_data: bool = False,
    ):
        if config.reward not in REWARD_MODES:
            raise ValueError(f"reward must be one of {REWARD_MODES}, got {config.reward!r}")
        if not tasks:
            raise ValueError("tasks must not be empty")
        if not devices:
            raise ValueError("devices must not be empty")
        device = devices[0]
        super().__init__(tasks, environments, config, device, assignment)
        self.devices = devices
        data = [(task, task.datasets()) for task in self.tasks]
        self.data_digests = data_digests(data) if digest_data else {}
        keys = [StackKey.of(*pair) for pair in data]
        distinct = list(dict.fromkeys(keys))
        hosts = [key.host for key in distinct]
        preload = config.preload if device.type == "cuda" else True
        for one in dict.fromkeys(devices):
            precision = precision_after_trial(precision, hosts, config.dtype, one, config.backend)
        self.precision = precision
        self.banks: dict[tuple[StackKey, torch.device], DataBank] = {}
        self.backends: dict[tuple[StackKey, torch.device], Backend] = {}
        self._row_memory: dict[tuple[StackKey, torch.device], RowMemory] = {}
        for key, one in product(distinct, dict.fromkeys(devices)):
            members = [pair for pair, k in zip(data, keys, strict=True) if k == key]
            self.banks[key, one] = DataBank(members, config.dtype, one, preload)
            self.backends[key, one] = choose_backend(
                config.backend, key.host, self.precision, config.dtype, one, config.threads
            )
            if one.type == "cuda":
                self._row_memory[key, one] = row_memory(
                    key.host, self.precision, config.dtype, one, config.batch_size
                )
            for index, (task, _) in enumerate(members):
                initial_hosts = trained_hosts(task, self.backends[key, one], config.dtype, one)
                if initial_hosts is not None:
                    self.banks[key, one].trained_hosts[index] = initial_hosts
        self._keys = distinct
        self._bank_of = torch.tensor([distinct.index(key) for key in keys], device=device)
        self._task_in_bank = torch.tensor(
            [self.banks[k, device].tasks.index(t) for t, k in zip(self.tasks, keys, strict=True)],
            device=device,
        )
        self.slot_count = max(len(task.host.slots) for task in self.tasks)
        workers = len(set(devices)) if device.type == "cuda" else config.threads
        self._pool = _thread_pool(workers) if workers > 1 else None
        self._tasks_of_shards: list[int] = []
        self.twin_groups = torch.unique(self.groups)
        rows = self.count + len(self.twin_groups)
        self.scales = ScaleTable.fresh(rows, device) if self.precision.scales_losses else None
        # A group split over two devices has a twin on each, whose scales adapt independently.
        more_devices = devices[1:] if self.scales else ()
        self._tables = [self.scales, *(ScaleTable.fresh(rows, one) for one in more_devices)]
        self._kept_scales = self.scales.state() if self.scales else {}

    @property
    def amp(self) -> MixedPrecision:
        """Precision and current loss scales, for telemetry; one transfer from the device."""
        enabled, dtype = self.precision.enabled, self.precision.dtype_name
        if self.scales is None:
            return MixedPrecision(enabled, dtype)
        scale, skips = self.scales.scale[: self.count], self.scales.skipped[: self.count]
        numbers = torch.stack([scale.mean(), scale.min(), skips.sum().float()])
        mean, least, count = numbers.tolist()
        return MixedPrecision(enabled, dtype, mean, least, int(count))

    def state(self) -> dict[str, Tensor]:
        """The state kept across episodes, for a checkpoint: the loss scales.

        Scales of the N environments and then of their twins by group, after the last complete
        episode; an episode that is cut short does not change them. Empty if losses are not scaled.
        """
        return dict(self._kept_scales)

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore what ``state`` returned.

        If this precision uses no loss scales, those of the state are ignored. If it uses some and
        the state has none, the current ones stay.

        Raises:
            UsageError: the state has another number of environments.
        """
        if self.scales is not None and state:
            self.scales.load(state)
            self._kept_scales = self.scales.state()

    @property
    def backend_name(self) -> str:
        """The backend of the hosts; ``native and torch`` if some host shapes need torch."""
        return " and ".join(sorted({backend.name for backend in self.backends.values()}))

    def reset(self, episode: int) -> Observation:
        """Begin episode number ``episode`` with newly initialised hosts."""
        for table in self._tables:
            if table is not None:
                table.load(self._kept_scales)
        self.draw_tasks(episode)
        if self._tasks_of_shards != self.task_numbers:
            self._make_shards()
        return self._merge(self._each([partial(shard.reset, episode) for shard in self.shards]))

    @property
    def shards(self) -> list[Shard]:
        """The shards of the environments in this episode."""
        return [part.shard for part in self.parts]

    def step(self, actions: Tensor) -> Step:
        """One step of every environment.

        Args:
            actions: int64 ``[N, heads]``. An illegal action changes nothing; see
                ``StepReport.success``.
        """
        calls = [
            partial(part.shard.step, actions[part.rows].to(part.shard.device))
            for part in self.parts
        ]
        step = self._merge(self._each(calls))
        self._gather_scales()
        if step.done and self.scales is not None:
            self._kept_scales = self.scales.state()
        return step

    def _make_shards(self) -> None:
        """Split the environments into shards: by device, then by bank, then by thread."""
        self._tasks_of_shards = self.task_numbers
        banks = self._bank_of[self.task_of]
        self.parts: list[_Part] = []
        earlier_groups: set[int] = set()
        for device_index, device_rows in enumerate(self._by_device(banks)):
            for number, key in enumerate(self._keys):
                rows = device_rows[banks[device_rows] == number]
                if len(rows) == 0:
                    continue
                runs = self._runs(rows)
                count = self._shard_count(key, device_index, runs)
                for members in rows.split(cut(runs, count)):
                    groups = torch.unique(self.groups[members]).tolist()
                    fresh = torch.tensor([group for group in groups if group not in earlier_groups])
                    earlier_groups.update(groups)
                    twins = torch.searchsorted(self.twin_groups, fresh.to(self.groups))
                    shard = self._shard(key, device_index, members)
                    self.parts.append(_Part(shard, device_index, members, twins))
        together = torch.cat([part.rows for part in self.parts])
        self._order = together.argsort()
        identity = torch.arange(self.count, device=self.device)
        self._in_order = torch.equal(self._order, identity)

    def _by_device(self, banks: Tensor) -> tuple[Tensor, ...]:
        """Indices of the environments of each device, sorted by bank and then by group.

        Groups stay whole if there are at least as many as devices. Otherwise groups are split, and
        each device trains its own twin for its part.
        """
        order = self.groups.argsort(stable=True)
        order = order[banks[order].argsort(stable=True)]
        runs, count = self._runs(order), len(self.devices)
        return order.split(cut(runs, count)) if len(runs) >= count else order.tensor_split(count)

    def _runs(self, rows: Tensor) -> list[int]:
        """Sizes of the groups in ``rows``, which are sorted by group."""
        return torch.unique_consecutive(self.groups[rows], return_counts=True)[1].tolist()

    def _shard(self, key: StackKey, device_index: int, rows: Tensor) -> Shard:
        device = self.devices[device_index]
        return Shard(
            self.banks[key, device],
            self.environments[rows].to(device),
            self._task_in_bank[self.task_of[rows]].to(device),
            self.config,
            self.backends[key, device],
            self._scales_of(device_index, rows),
        )

    def _scales_of(self, device_index: int, rows: Tensor) -> LossScales | None:
        """The loss scales of the environments ``rows``, then of their twins."""
        table = self._tables[device_index] if self.scales is not None else None
        if table is None:
            return None
        twins = torch.searchsorted(self.twin_groups, torch.unique(self.groups[rows]))
        return LossScales(table, torch.cat([rows, self.count + twins]).to(table.scale.device))

    def _gather_scales(self) -> None:
        """Copy the scales of environments on other devices into ``scales``."""
        for part in self.parts:
            table = self._tables[part.device_index] if self.scales is not None else None
            if table is not None and self.scales is not None and table is not self.scales:
                table.copy_rows(self.scales, torch.cat([part.rows, self.count + part.twins]))

    def _shard_count(self, key: StackKey, device_index: int, runs: list[int]) -> int:
        """Number of shards for environments of one bank in groups of the sizes ``runs``.

        Raises:
            UsageError: the memory of a CUDA device is too small.
        """
        device = self.devices[device_index]
        if device.type == "cuda":
            memory = self._row_memory[key, device]
            rows = (self.count + len(self.twin_groups)) // len(set(self.devices))
            return parts_within(rows_at_a_time(memory, rows, device), runs, device)
        if self.backends[key, device].uses_all_threads:
            return 1
        return max(self.config.threads, -(-sum(runs) // MAX_ROWS))

    def _each(self, calls: Sequence[Callable[[], _T]]) -> list[_T]:
        """Results of the calls, one per shard, run in the thread pool, the most expensive first.

        Shards whose backend is multi-threaded run one after another in the calling thread, those of
        a CUDA device one after another in one thread, because only one fits into its memory.
        """
        calls = [partial(self._with_shard_name, number, call) for number, call in enumerate(calls)]
        if self._pool is None or len(calls) == 1:
            return [call() for call in calls]
        if self.device.type == "cuda":
            return self._each_by_device(self._pool, calls)
        sequential = [shard.engine.backend.uses_all_threads for shard in self.shards]
        longest_first = sorted(range(len(calls)), key=lambda i: -self.shards[i].cost)
        futures = {i: self._pool.submit(calls[i]) for i in longest_first if not sequential[i]}
        wait(futures.values())  # all shards have stopped before an error of one is raised
        return [call() if sequential[i] else futures[i].result() for i, call in enumerate(calls)]

    def _each_by_device(
        self, pool: ThreadPoolExecutor, calls: Sequence[Callable[[], _T]]
    ) -> list[_T]:
        where = [self.devices[part.device_index] for part in self.parts]

        def in_turn(numbers: list[int]) -> dict[int, _T]:
            return {number: calls[number]() for number in numbers}

        futures = [
            pool.submit(in_turn, [i for i, device in enumerate(where) if device == one])
            for one in dict.fromkeys(where)
        ]
        wait(futures)
        results: dict[int, _T] = {}
        for future in futures:
            results |= future.result()
        return [results[i] for i in range(len(calls))]

    def _with_shard_name(self, number: int, call: Callable[[], _T]) -> _T:
        """The result of ``call``; if there are several shards, an error names the one at fault."""
        try:
            return call()
        except Exception as error:
            if len(self.parts) == 1:
                raise
            part = self.parts[number]
            who = span(self.environments[part.rows].tolist())
            raise ShardError(
                f"shard {number + 1} of {len(self.parts)} on {self.devices[part.device_index]} "
                f"({who}): {type(error).__name__}: {error}"
            ) from error

    def _merge(self, parts: list[_T]) -> _T:
        """Merge the results of the shards in the order of the environments."""
        if len(parts) == 1 and self._in_order:
            return parts[0]
        result: _T = merge(parts, self._order)
        return result


@cache
def _thread_pool(workers: int) -> ThreadPoolExecutor:
    """A pool of threads for shards, in which torch runs each operation on a single thread.

    Splitting the many small operations over threads would gain nothing and cost a barrier each.
    """
    return ThreadPoolExecutor(workers, "lane", torch.set_num_threads, (1,))
