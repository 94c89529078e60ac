"""The run directory of ``esper.grow``: its events, for report, Sanctum, queries and trackers."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path

from torch import nn

from esper.kasmina.wider_layers import parameter_count
from esper.leyline.events import (
    SCHEMA_VERSION,
    GrowthEpochCompleted,
    GrowthFinished,
    GrowthStarted,
    number,
    numbers,
)
from esper.leyline.run_files import EVENTS_LOCK, lock_folder
from esper.nissa.hub import Hub
from esper.nissa.sinks import JsonLines, Sink
from esper.nissa.trackers import TensorBoard, WandB, require_library
from esper.own_models.growth_result import EpochRecord, GrowthResult
from esper.own_models.options import GrowOptions


@contextmanager
def run_log(folder: Path, model: nn.Module, options: GrowOptions) -> Iterator["RunLog"]:
    """The open log of a run directory, which is made; no other process can open it.

    Raises:
        UsageError: the directory cannot be written, another process writes to it, or the library
            of a tracker is missing.
    """
    for name in ("tensorboard", "wandb"):
        if getattr(options, name):
            require_library(name, "normal")
    with lock_folder(folder, EVENTS_LOCK, "run_directory"):
        log = RunLog(folder, model, options)
        try:
            yield log
        finally:
            log.hub.close()


class RunLog:
    """Writes what happens while a module grows.

    Args:
        folder: the run directory.
        model: the module before it grows.
        options: see ``grow``.
    """

    def __init__(self, folder: Path, model: nn.Module, options: GrowOptions):
        sinks: list[Sink] = [JsonLines(folder)]
        if options.tensorboard:
            sinks.append(TensorBoard(folder / "tensorboard"))
        if options.wandb:
            sinks.append(WandB(folder))
        self.hub = Hub(sinks, "normal")
        policy = options.policy
        event = GrowthStarted(
            time=time.time(), schema=SCHEMA_VERSION, model=type(model).__name__,
            policy=policy if isinstance(policy, str) else type(policy).__name__,
            epochs=options.epochs, tries=options.tries, price=options.price,
            parameters=parameter_count(model),
        )  # fmt: skip
        self.hub.emit(event)

    def epoch(self, variant: str, attempt: int, record: EpochRecord) -> None:
        """Write an epoch of a variant; it is on the disk soon after, for those who watch."""
        result = record.validation
        event = GrowthEpochCompleted(
            time=time.time(), variant=variant, attempt=attempt, epoch=record.epoch,
            unit=result.unit, figure=number(result.figure), loss=number(result.loss),
            train_loss=None if record.train_loss is None else number(record.train_loss),
            parameters=record.parameters,
            stages={slot: stage.name for slot, stage in record.stages.items()},
            actions=record.actions,
        )  # fmt: skip
        self.hub.emit(event)

    def finish(self, result: GrowthResult) -> None:
        """Write the result beside its twin."""
        both = [result, *([result.twin] if result.twin else [])]
        sizes = {
            f"{name}.{attribute}": f"{before} -> {after}"
            for name, changes in result.widths.items()
            for attribute, (before, after) in changes.items()
            if before != after
        }
        for name, count in Counter(name for name, _ in result.copies).items():
            depth = len(result.model.get_submodule(name))  # type: ignore[arg-type]
            sizes[name] = f"{depth - count} -> {depth} blocks"
        has_verdict = result.twin is not None and isfinite(result.twin.worth)
        event = GrowthFinished(
            time=time.time(), unit=result.validation.unit,
            validation=numbers([one.validation.figure for one in both]),
            test=[number(one.test.figure) for one in both if one.test is not None],
            parameters=[one.parameters for one in both],
            seconds=[one.seconds for one in both], verdict=result.verdict(),
            paid=result.paid if has_verdict else None, grew=sizes | result.seeds,
        )  # fmt: skip
        self.hub.emit(event)
