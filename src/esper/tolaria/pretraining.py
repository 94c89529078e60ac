"""Hosts that are trained before their episode begins, as for a task that adapts a trained host."""

from dataclasses import replace

import torch

from esper.kasmina.seeds import SeedState
from esper.runtime.tasks import Pretraining, Task
from esper.tolaria.backends import Backend
from esper.tolaria.bank import DataBank, TrainedHosts
from esper.tolaria.engine import Engine, Rows

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
