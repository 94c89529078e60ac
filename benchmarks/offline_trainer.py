"""Speed of the offline trainer: eager, compiled and in mixed precision, in turns."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from reporting import in_turns

from esper.leyline.config.offline import ImitationConfig
from esper.simic.offline.batches import EpisodeLoader
from esper.simic.offline.offline_run import build_trainer
from esper.simic.offline.recorded_data import RecordedData, read_data
from esper.simic.trainer import Batch, Trainer
from esper.simic.training.setup import arithmetic

CPU, CUDA = torch.device("cpu"), "cuda"
Variant = dict[str, Any]


def variants(device: torch.device) -> dict[str, Variant]:
    """Return what differs from the default in each variant, by name; the first is the reference."""
    off: Variant = {"compile": "off", "amp": False}
    found = {
        "eager": off,
        "compiled": off | {"compile": "default"},
        "AMP": off | {"amp": True},
        "AMP, compiled": {"compile": "default", "amp": True},
    }
    if device.type == CUDA:
        return found | {"eager, without TF32": off | {"tf32": False}}
    return found


def trainer_rows(
    records: Path, device: torch.device, batch_size: int, repeats: int
) -> list[dict[str, Any]]:
    """Return median times of a training step by variant; the variants take turns.

    Args:
        records: run with records.
        device: device of the trainers.
        batch_size: episodes of the batch that every step learns from.
        repeats: number of timed turns.
    """
    config = ImitationConfig(records=(str(records),), device=str(device), held_out=0.0)
    data = read_data(config)
    chosen = torch.arange(batch_size) % data.episodes.count
    calls: dict[str, Callable[[], object]] = {}
    for name, variant in variants(device).items():
        calls[name] = _step(config, variant, data, chosen, device)
    times = in_turns(calls, repeats)
    reference = times["eager"][0]
    steps = int(data.episodes.lengths[chosen].sum())
    return [
        {
            "variant": name,
            "milliseconds": 1000.0 * wall,
            "steps_per_second": 1.0 / wall,
            "recorded_steps_per_second": steps / wall,
            "ratio": reference / wall,
        }
        for name, (wall, _) in times.items()
    ]


def _step(
    config: ImitationConfig,
    variant: Variant,
    data: RecordedData,
    chosen: torch.Tensor,
    device: torch.device,
) -> Callable[[], object]:
    """Return a call that loads the batch and learns from it once, and waits for the device."""
    own = replace(config, **variant)
    threads = torch.get_num_threads()
    trainer: Trainer = build_trainer(own, data, device, threads)
    loader = EpisodeLoader(data.episodes, data.returns, device)

    def call() -> None:
        with arithmetic(device, threads, own.tf32):
            batch: Batch
            for batch in loader.batches(chosen, len(chosen)):
                float(trainer.step(batch)["loss"])
        if own.compile != "off" and not trainer.compiled:
            raise SystemExit(f"{variant}: the step did not compile; see the warning above")

    return call
