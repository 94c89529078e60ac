"""An epoch of training: the plain loop over a loader, in the order that PyTorch's tutorials use."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from esper.leyline.errors import UsageError
from esper.own_models.objectives import Objective
from esper.own_models.samples import Unpack, call, moved, sample_count, unpack
from esper.own_models.validation import Validation, autocast

PER_BATCH = (OneCycleLR, CyclicLR)
"""Schedulers that step after every minibatch; others step after every epoch."""


@dataclass
class Training:
    """Trains a module on a loader.

    Attributes:
        model: the module.
        loader: minibatches; read once per epoch.
        objective: the loss.
        optimizer: updates the parameters.
        device: device of the module.
        scheduler: see ``PER_BATCH``; for ``ReduceLROnPlateau`` see ``end_epoch``.
        clip: clips the gradients before an update; None for none.
        unpack: splits a batch.
        amp_dtype: dtype of autocast; float16 on CUDA also scales the loss.
        higher_is_better: whether a higher metric is better.
    """

    model: nn.Module
    loader: Iterable[Any]
    objective: Objective
    optimizer: Optimizer
    device: torch.device
    scheduler: LRScheduler | None = None
    clip: Callable[[], None] | None = None
    unpack: Unpack = unpack
    amp_dtype: torch.dtype | None = None
    higher_is_better: bool = True
    _eval_modules: list[nn.Module] = field(default_factory=list)

    def __post_init__(self) -> None:
        scaled = self.amp_dtype == torch.float16 and self.device.type == "cuda"
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=scaled)
        if self.model.training:
            # Parts that the user put in evaluation mode, such as a pretrained BatchNorm, stay
            # there.
            self._eval_modules = [module for module in self.model.modules() if not module.training]

    def epoch(self) -> float:
        """Train one epoch.

        Returns:
            the mean loss over the samples.

        Raises:
            UsageError: the loader yields nothing.
        """
        self.model.train()
        for module in self._eval_modules:
            module.training = False
        total, count = torch.zeros((), dtype=torch.float64, device=self.device), 0
        for batch in self.loader:
            inputs, target = moved(self.unpack(batch), self.device)
            self.optimizer.zero_grad()
            with autocast(self.device, self.amp_dtype):
                loss = self.objective.loss(call(self.model, inputs), target)
            self.scaler.scale(loss).backward()
            if self.clip is not None:
                self.scaler.unscale_(self.optimizer)
                self.clip()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if isinstance(self.scheduler, PER_BATCH):
                self.scheduler.step()
            samples = sample_count(inputs)
            total, count = total + loss.detach() * samples, count + samples
        if count == 0:
            raise UsageError("train_loader: it yields no batch; give one that does")
        return float(total) / count

    def end_epoch(self, validation: Validation) -> None:
        """Step a scheduler of epochs.

        ``ReduceLROnPlateau`` gets the metric if its mode is that of the metric: ``max`` where
        higher is better, else ``min``. Otherwise it gets the score in mode ``max``, and the loss
        in mode ``min``.
        """
        if isinstance(self.scheduler, ReduceLROnPlateau):
            rises = self.scheduler.mode == "max"
            value = validation.score if rises else validation.loss
            if validation.metric is not None and rises == self.higher_is_better:
                value = validation.metric
            self.scheduler.step(value)
        elif self.scheduler is not None and not isinstance(self.scheduler, PER_BATCH):
            self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """The states of optimizer, scheduler and loss scaler."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else _state_of(self.scheduler),
            "scaler": self.scaler.state_dict(),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """The inverse of ``state_dict``."""
        self.optimizer.load_state_dict(saved["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(saved["scheduler"])
        self.scaler.load_state_dict(saved["scaler"])


def _state_of(scheduler: LRScheduler) -> dict[str, Any]:
    """The state of a scheduler without what only its factory knows."""
    return {k: v for k, v in scheduler.state_dict().items() if not callable(v)}
