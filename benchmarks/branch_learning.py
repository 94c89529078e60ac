"""How controllers learn from branches, and what they choose on hosts they did not learn from."""

from typing import Any

import numpy as np
import torch
from branch_outcomes import Outcomes, divided, mean_and_error
from branches import Branching
from torch import Tensor

from esper.leyline.config.offline import OfflineConfig, OfflineMethod
from esper.simic.offline.batches import batch_of, epoch_order, groups_of
from esper.simic.offline.methods import branches
from esper.simic.offline.offline_run import build_trainer
from esper.simic.offline.recorded_data import RecordedData
from esper.tamiyo.policy.factored_lstm import FactoredLSTM
from esper.tamiyo.policy.interface import RecurrentState

HOSTS_PER_BATCH = 32
AWR_TEMPERATURE = 0.25
EPOCHS = 12
"""Passes over all draws; as many steps for fewer draws."""


def learning(branching: Branching) -> dict[str, Any]:
    """Settings of ``esper train offline``, see ``OfflineConfig``."""
    return {
        "method": "vine",
        "temperature": 0.5,
        "entropy": 0.02,
        "batch_size": HOSTS_PER_BATCH * len(branching.branches),
        "learning_rate": 2e-3,
        "epochs": 20,
        "patience": 8,
        "lstm_hidden": 64,
        "value_weight": 0.05,
    }


class WithoutMemory(FactoredLSTM):
    """The policy's network with an LSTM that begins anew in every step."""

    def run_lstm(self, features: Tensor, hidden: RecurrentState) -> tuple[Tensor, RecurrentState]:
        """See ``Policy.run_lstm``; the steps are computed like environments."""
        steps, environments = features.shape[:2]
        anew = self.initial_hidden(steps * environments)
        memory, _ = super().run_lstm(features.reshape(1, steps * environments, -1), anew)
        return memory.view(steps, environments, -1), hidden


def by_method(
    data: RecordedData, found: Outcomes, method: OfflineMethod, share: float, memory: bool = True
) -> dict[str, float]:
    """Worth on held-out hosts of what a controller chooses that learned from some of the others.

    Cloning copies the best branch of each host, as a clairvoyant would choose it; the other
    methods learn from all branches. With it come the shares of the variance of the returns that
    the critic explains within a step, and within step and host.
    """
    count = len(found.branching.branches)
    held_out, learned = divided(len(found.above), share)
    settings = {**learning(found.branching), "method": method}
    if method == "awr":
        settings["temperature"] = AWR_TEMPERATURE
    config = OfflineConfig(records=("-",), threads=1, compile="off", amp=False, **settings)
    trainer = build_trainer(config, data, torch.device("cpu"), 1)
    if not memory:
        trainer.policy.__class__ = WithoutMemory
    groups = groups_of(data.episodes)
    places = torch.arange(count)
    best = torch.tensor(found.above.argmax(1))
    for epoch in range(round(EPOCHS / share)):
        for part in epoch_order(learned, 1, epoch).split(HOSTS_PER_BATCH):
            chosen = (part[:, None] * count + places).flatten()
            if method == "bc":
                chosen = part * count + best[part]
            trainer.step(batch_of(data.episodes, data.returns, chosen, groups))
    greedy, expected, errors, deviations = [], [], [], []
    for part in held_out.split(64):
        chosen = (part[:, None] * count + places).flatten()
        batch = batch_of(data.episodes, data.returns, chosen, groups)
        with torch.no_grad():
            evaluation = trainer.network(batch)
            _, log_chosen = branches(evaluation.log_prob, batch)
        returns = trainer.return_moments.scale(batch.returns)
        errors.append((returns - evaluation.value).unflatten(1, (-1, count)))
        deviations.append(returns.unflatten(1, (-1, count)))
        probability = log_chosen.exp().view(-1, count).double().numpy()
        above = found.above[part.numpy()]
        greedy.append(above[np.arange(len(above)), probability.argmax(1)])
        expected.append((probability * above).sum(1))
    worth, error = mean_and_error(np.concatenate(greedy))
    return {
        "draws": len(learned),
        "greedy": worth,
        "error": error,
        "sampled": float(np.concatenate(expected).mean()),
        "explained": _explained(torch.cat(errors, 1), torch.cat(deviations, 1), (1, 2)),
        "explained_of_host": _explained(torch.cat(errors, 1), torch.cat(deviations, 1), (2,)),
    }


def _explained(errors: Tensor, returns: Tensor, axes: tuple[int, ...]) -> float:
    """Share of the variance of ``returns [T, G, B]`` along some axes that is not in the errors."""
    remaining = errors - errors.mean(axes, keepdim=True)
    total = returns - returns.mean(axes, keepdim=True)
    return float(1.0 - remaining.square().sum() / total.square().sum())
