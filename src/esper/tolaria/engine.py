"""The engine: trains N hosts of one shape and measures them once per step."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from esper.kasmina.hosts.module import ModuleHost
from esper.kasmina.rng import Purpose, StepBits, random_bits, to_integers, uniform
from esper.kasmina.seeds import SeedState
from esper.kasmina.slots import initial_distribution_on, stack_tables
from esper.kasmina.transfer import moved_together, on_host
from esper.leyline.stages import Stage
from esper.runtime.tasks import Pretraining, Task
from esper.tolaria.backends import Backend, HeldBack, Minibatches, Optimisation, Variant
from esper.tolaria.bank import ChannelMove, DataBank, TrainedHosts, channel_moves
from esper.tolaria.coalitions import Coalitions, coalition_variants, grouped_by_first_change
from esper.tolaria.memory import keep_memory
from esper.tolaria.plan import Seeds, moved_variants
from esper.tolaria.precision import LossScales
from esper.tolaria.results import EpochResult, Measurement, Scores
from esper.tolaria.stores import Stack

_OUTSIDE_INFERENCE_MODE = partial(torch.inference_mode, False)
"""Context in which backends run, because autograd records nothing in inference mode."""


Variants = tuple[list[Variant], list[Variant]]
"""Ablations (one acting seed removed) and commitments (fossilised seeds only)."""


class Rows:
    """Identities of the rows of a stack.

    Args:
        environment: identity of each row's seeds, int64 ``[N]``.
        group: identity of each row's host and data, int64 ``[N]``. Rows of one group start from the
            same host and see the same minibatches; their tasks may differ in rate and decay alone.
        task: index of each row's task in the data bank, int64 ``[N]``; None means all 0.
    """

    def __init__(self, environment: Tensor, group: Tensor, task: Tensor | None = None):
        self.environment, self.group = environment, group
        self.task = torch.zeros_like(group) if task is None else task
        self.groups, self.group_index = torch.unique(group, return_inverse=True)
        group_task = torch.zeros_like(self.groups)
        self.group_task = group_task.scatter(0, self.group_index, self.task)

    def __len__(self) -> int:
        return len(self.environment)


class Engine:
    """Parameters, data and arithmetic of N hosts.

    Args:
        bank: tasks and their data.
        rows: identities; the results of a row depend only on its identities.
        seed: seed of the run, in [0, 2^32).
        backend: does the arithmetic; created for the bank's host.
        max_batches: minibatches per epoch.
        batch_size: images per minibatch.
        episode_length: steps per episode; a task's data may drift within an episode.
        scales: loss scales of the rows, for backends that compute in float16.
        data_seed: seed of the minibatches, ``seed`` if None.
    """

    def __init__(
        self,
        bank: DataBank,
        rows: Rows,
        seed: int,
        backend: Backend,
        max_batches: int,
        batch_size: int,
        episode_length: int = 1,
        scales: LossScales | None = None,
        data_seed: int | None = None,
    ):
        keep_memory()
        self.bank = bank
        self.host = bank.tasks[0].host
        self.slots = self.host.slots
        self._slots = range(len(self.slots))
        self.rows = rows
        self.seed = seed
        self.dtype = dtype = bank.train_images.dtype
        self.device = device = bank.device
        self.max_batches = max_batches
        self.batch_size = batch_size
        self.episode_length = episode_length
        self.backend = backend
        self.stack = Stack.allocate(
            len(rows),
            self.host.layout.size,
            self.host.buffers.size,
            [slot.width for slot in self.slots],
            dtype,
            device,
        )
        self.scales = scales
        self.data_seed = seed if data_seed is None else data_seed
        self.parameter_table = stack_tables(self.slots, "parameter_table").to(device)
        self._before = bank.before[rows.group_task]
        self._after = bank.after[rows.group_task]
        self.episode = 0
        self._channel_moves: dict[int, ChannelMove] = {}

    def reset(self, episode: int) -> None:
        """Start an episode: fresh hosts without seeds."""
        self.episode = episode
        groups, index = self.rows.groups, self.rows.group_index
        self.switch_step = self.bank.switch_steps(
            self.seed, groups, self.rows.group_task, episode, self.episode_length
        )
        count = self.max_batches * self.batch_size * (1 if self.bank.augmentation is None else 2)
        self.draws = StepBits(self.data_seed, groups, Purpose.MINIBATCH, episode, count)
        parameters, buffers = self._initial_hosts(groups)
        self.stack.host.copy_(parameters[index])
        self.stack.buffers.copy_(buffers[index])
        for store in self.stack.seeds:
            store.zero_()
        self.stack.clear_optimizers()
        self._channel_moves = channel_moves(
            self.bank.channel_shifts,
            self.rows.task,
            self.switch_step[self.rows.group_index],
            self.episode_length,
        )

    def shift_channels(self, step: int) -> ChannelMove | None:
        """Shift the channels of the hosts whose drift comes at ``step``; call it before training.

        Returns:
            What was moved, for copies of the hosts; None if nothing was.
        """
        move = self._channel_moves.get(step)
        if move is not None:
            optimizer = self.stack.host_optimizer
            move.of_parameters(self.stack.host, optimizer.first, optimizer.second)
            move.of_buffers(self.stack.buffers)
        return move

    def germinate(self, where: Tensor, blueprint: Tensor, step: int) -> None:
        """Initialise the parameters of new seeds.

        Args:
            where: bool ``[N, S]``, the seeds that germinate now; best in CPU memory.
            blueprint: int64 ``[N, S]``.
            step: step of the episode; part of the key from which the parameters are drawn.
        """
        (where,) = on_host(where)
        every = moved_together([where[:, s].nonzero()[:, 0] for s in self._slots], self.device)
        for s, (slot, rows) in enumerate(zip(self.slots, every, strict=True)):
            if len(rows) == 0:
                continue
            constant, bound = initial_distribution_on(slot, self.device)
            kinds = blueprint[rows, s]
            self.stack.seeds[s][rows] = self._draw_initial(
                constant[kinds],
                bound[kinds],
                self.rows.environment[rows],
                Purpose.SEED_INIT + s,
                step,
            )
            self.stack.seed_optimizers[s].clear_rows(rows)

    def train(self, state: SeedState, step: int, host: SeedState | None = None) -> EpochResult:
        """Train every host, and every seed from TRAINING on, for one epoch.

        ``host`` is the state in CPU memory, as in the functions below; copied there when None.
        """
        seeds, minibatches = Seeds.training(state, host), self.minibatches(step)
        with _OUTSIDE_INFERENCE_MODE():
            return self.backend.train_epoch(self.stack, seeds, minibatches, self.optimisation(step))

    def optimisation(self, step: int) -> Optimisation:
        """How hosts and seeds are updated at ``step``."""
        bank, task = self.bank, self.rows.task
        factor = bank.rate_factors(step, self.episode_length)
        seeds = (bank.seed_rates * factor)[task]
        return Optimisation(
            host_learning_rate=(bank.host_rates * factor)[task],
            seed_learning_rate=seeds[:, None].expand(-1, len(self.slots)),
            weight_decay=bank.tasks[0].weight_decay,
            max_gradient_norm=bank.tasks[0].max_gradient_norm,
            momentum=bank.tasks[0].momentum,
            scales=self.scales,
            tuning=None if bank.tunings is None else bank.tunings[task],
        )

    def measure(
        self,
        state: SeedState,
        step: int,
        committed: bool,
        split: str = "validation",
        rows: Tensor | None = None,
        variants: Variants | None = None,
        host: SeedState | None = None,
    ) -> Measurement:
        """Validate the hosts, each host without each of its acting seeds, and the committed hosts.

        Unless the committed hosts are measured, on the part of the images that is the turn of
        ``step``, if the task has parts.

        Args:
            state: the seeds of the rows to measure.
            step: step of the episode, which selects the data before or after a drift.
            committed: whether to measure the hosts with fossilised seeds only.
            split: ``validation`` or ``test``.
            rows: rows to measure, int64 ``[R]``; all when None.
            variants: ``self.variants(state, committed)``, computed here when None.
            host: ``state`` in CPU memory.
        """
        host = host or state.on_host()
        ablations, commitments = variants or self.variants(host, committed)
        in_turn = split == "validation" and not committed
        held_back = self._held_back(step, None if in_turn else split, rows)
        scores, parts = self._evaluate(state, host, ablations + commitments, held_back, rows)
        contribution = torch.where(state.acting, 0.0, float("nan"))
        for variant, without in zip(ablations, parts, strict=False):
            change = scores.expected[variant.rows] - without.expected
            contribution[variant.rows, variant.start] = change.float()
        committed_scores = None
        if committed:
            committed_scores = scores.map(torch.clone)
            for variant, part in zip(commitments, parts[len(ablations) :], strict=True):
                committed_scores.put(variant.rows, part)
        return Measurement(scores, committed_scores, contribution)

    def committed_scores(
        self, state: SeedState, step: int, split: str, host: SeedState | None = None
    ) -> Scores:
        """Scores of the hosts with fossilised seeds only on ``validation`` or ``test``, ``[N]``."""
        host = host or state.on_host()
        fossils = _fossils(host)
        on_device = fossils if host is state else _fossils(state)
        return self._evaluate(on_device, fossils, [], self._held_back(step, split))[0]

    def variants(self, state: SeedState, committed: bool) -> Variants:
        """The ablations and commitments that ``measure`` validates, on the hosts' device.

        ``state`` is best in CPU memory. Computing them before the epoch costs a third of computing
        them after it, because the epoch evicts everything but the hosts from the caches.
        """
        host = state.on_host()
        ablations, commitments = _ablations(host), []
        if committed:
            candidates = (host.alpha > 0) & (host.stage != Stage.FOSSILISED)
            commitments = grouped_by_first_change(host, candidates)
        on_device = moved_variants(ablations + commitments, self.device)
        return on_device[: len(ablations)], on_device[len(ablations) :]

    def coalitions(self, state: SeedState, step: int, host: SeedState | None = None) -> Coalitions:
        """Expected accuracy of every coalition of acting seeds; see ``Coalitions``."""
        host = host or state.on_host()
        coalitions = Coalitions.of(state)
        on_host, columns = coalition_variants(host, coalitions.members)
        variants = moved_variants(on_host, self.device)
        held_back = self._held_back(step, "validation")
        scores, variant_scores = self._evaluate(state, host, variants, held_back)
        return coalitions.with_values(scores.expected, variants, columns, variant_scores)

    def _held_back(self, step: int, split: str | None, rows: Tensor | None = None) -> HeldBack:
        """All images of a split for ``rows``, or the part of the validation split for ``step``."""
        dataset = self.datasets(step)[self.rows.group_index]
        dataset = dataset if rows is None else dataset[rows]
        if split is None:
            return self.bank.validation_part(step, dataset)
        return self.bank.held_back(split, dataset)

    def _evaluate(
        self,
        state: SeedState,
        host: SeedState,
        variants: list[Variant],
        held_back: HeldBack,
        rows: Tensor | None = None,
    ) -> tuple[Scores, list[Scores]]:
        seeds = Seeds.acting(state, host)
        with _OUTSIDE_INFERENCE_MODE():
            return self.backend.evaluate(self.stack, seeds, held_back, variants, rows)

    def datasets(self, step: int) -> Tensor:
        """Index of the data set that each group learns from at ``step``, int64 ``[G]``."""
        return torch.where(step >= self.switch_step, self._after, self._before)

    def seed_parameters(self, state: SeedState) -> Tensor:
        """Parameter count of each living seed, int64 ``[N, S]``; 0 in other slots."""
        slot = torch.arange(len(self.slots), device=self.device)
        counts = self.parameter_table[slot, state.blueprint, state.style]
        return torch.where(state.living, counts, 0)

    def _initial_hosts(self, groups: Tensor) -> tuple[Tensor, Tensor]:
        """Parameters ``[G, P]`` and buffers ``[G, Q]`` of the hosts at the start of an episode."""
        parameters, buffers = self._untrained_hosts(groups)
        by_task = self.bank.trained_hosts
        if not by_task:
            return parameters, buffers
        bits = random_bits(self.seed, groups, Purpose.HOST_INIT, self.episode, 0, 1)
        # The tasks of a family share their hosts.
        for hosts in {id(hosts): hosts for hosts in by_task.values()}.values():
            index = to_integers(bits, len(hosts.parameters))[:, 0]
            tasks = torch.tensor([task for task in by_task if by_task[task] is hosts])
            mine = torch.isin(self.rows.group_task, tasks.to(self.device))[:, None]
            parameters = torch.where(mine, hosts.parameters[index], parameters)
            buffers = torch.where(mine, hosts.buffers[index], buffers)
        return parameters, buffers

    def _untrained_hosts(self, groups: Tensor) -> tuple[Tensor, Tensor]:
        """Parameters ``[G, P]`` and buffers ``[G, Q]`` of untrained hosts."""
        if isinstance(self.host, ModuleHost):
            keys = random_bits(self.seed, groups, Purpose.HOST_INIT, self.episode, 0, 1)[:, 0]
            values = self.host.initial_values(keys.tolist())
            return values[0].to(self.device), values[1].to(self.device)
        layout, buffers = self.host.layout, self.host.buffers
        constant, _ = buffers.initial_distribution(buffers.size)
        distribution = layout.initial_distribution(layout.size)
        parameters = self._draw_initial(*distribution, groups, Purpose.HOST_INIT, 0)
        return parameters, constant.to(self.device, self.dtype).expand(len(groups), -1)

    def _draw_initial(
        self, constant: Tensor, bound: Tensor, streams: Tensor, purpose: int, step: int
    ) -> Tensor:
        width = constant.shape[-1]
        draws = uniform(self.seed, streams, purpose, self.episode, step, width, dtype=torch.float64)
        values = constant.to(self.device) + bound.to(self.device) * (2.0 * draws - 1.0)
        return values.to(self.dtype)

    def minibatches(self, step: int) -> Minibatches:
        """The minibatches of an epoch, drawn with replacement, the same for all rows of a group.

        The first random words of a step select the images, the following words the poses.
        """
        shape = (self.max_batches, self.batch_size)
        bank, count = self.bank, self.max_batches * self.batch_size
        bits = self.draws.at(step).unflatten(1, (-1, count))
        poses = bank.poses(bits[:, -1])
        return Minibatches(
            bank.train_images,
            bank.train_labels,
            bank.samples(bits[:, 0], self.datasets(step)).unflatten(1, shape),
            self.rows.group_index,
            bank.augmentation,
            None if poses is None else poses.unflatten(1, shape),
            bank.streamed,
        )


def _ablations(state: SeedState) -> list[Variant]:
    """Variants with the alpha of one acting seed set to 0, one variant per slot."""
    acts = (state.alpha > 0).T
    rows = acts.nonzero()[:, 1].split(acts.sum(1).tolist())
    variants = []
    for s, mine in enumerate(rows):
        if len(mine):
            alpha = state.alpha[mine]
            alpha[:, s] = 0.0
            variants.append(Variant(s, mine, alpha))
    return variants


def _fossils(state: SeedState) -> SeedState:
    """The state with the alpha of every seed that is not fossilised set to 0."""
    return replace(state, alpha=torch.where(state.stage == Stage.FOSSILISED, state.alpha, 0.0))


_HOSTS: dict[tuple[object, ...], TrainedHosts] = {}


def trained_hosts(
    task: Task, backend: Backend, dtype: torch.dtype, device: torch.device
) -> TrainedHosts | None:
    """The hosts that ``task`` starts from; None for a task that starts from initial weights.

    Trained once per process for all tasks with the same host, ``pretraining`` and budget. The
    weights depend on these alone, and not on the seed of a run.
    """
    pretraining = task.pretraining
    if pretraining is None:
        return None
    key = (
        *(pretraining, task.host, task.max_batches, task.batch_size),
        *(task.weight_decay, task.momentum, task.max_gradient_norm, task.augmentation),
        *(backend.name, dtype, str(device)),
    )
    if key not in _HOSTS:
        _HOSTS[key] = _train(task, pretraining, backend, dtype, device)
    return _HOSTS[key]


def _train(
    task: Task, pretraining: Pretraining, backend: Backend, dtype: torch.dtype, device: torch.device
) -> TrainedHosts:
    before = replace(
        task,
        data=pretraining.data,
        learning_rate=pretraining.learning_rate,
        host_learning_rate=None,
        tuning="all",
        decay="cosine",
        deadline=1.0,
        drift=None,
        pretraining=None,
    )
    bank = DataBank([(before, before.datasets())], dtype, device)
    identities = torch.arange(pretraining.hosts, device=device)
    engine = Engine(
        bank,
        Rows(identities, identities),
        pretraining.seed,
        backend,
        task.max_batches,
        task.batch_size,
        pretraining.steps,
    )
    engine.reset(0)
    seeds = SeedState.dormant((pretraining.hosts, len(engine.slots)), device)
    for step in range(pretraining.steps):
        engine.train(seeds, step)
    return TrainedHosts(engine.stack.host.clone(), engine.stack.buffers.clone())
