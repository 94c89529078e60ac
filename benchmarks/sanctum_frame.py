"""How long Sanctum takes to open a long run, and to draw a frame of it.

    python benchmarks/sanctum_frame.py --write

The run is generated: 10^6 environment steps at 64 environments with three slots each, level normal
(15,625 steps). It opens when the status line of a real (pseudo) terminal says ``finished``, counted
from the start of the process. Frames are drawn in this process, at moments spread over a replay:
from the moment asked for to the characters of the whole screen. Processor time is given besides
wall time, for a machine may be busy with other things.
"""

import argparse
import asyncio
import fcntl
import json
import os
import pty
import random
import select
import struct
import sys
import tempfile
import termios
import time
from pathlib import Path
from statistics import median

from machine import made_on

from esper.karn.sanctum.app import PAGES, Sanctum
from esper.leyline.actions import BLUEPRINTS, HEADS, Op
from esper.leyline.events import (
    AnalyticsSnapshot,
    DecisionsMade,
    EpisodeOutcome,
    EpisodeStarted,
    EpochCompleted,
    Event,
    PPOUpdateCompleted,
    TrainingFinished,
    TrainingStarted,
    encode,
)
from esper.leyline.metrics import Metric, part_metric
from esper.leyline.stages import Stage

RESULTS = Path(__file__).parent / "results"
ENVS, SLOTS, LENGTH, STEPS = 64, 3, 125, 15_625
SIZES = ((80, 24), (160, 50))
FRAMES = 30
LIFE = (Stage.DORMANT, Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.FOSSILISED)


def write_run(folder: Path, steps: int = STEPS) -> None:
    """A run directory of ``steps`` step events."""
    draw = random.Random(1)
    (folder / "config.json").write_text(json.dumps({"settings": {}, "fingerprint": {}}))
    with (folder / "events.jsonl").open("wb") as file:

        def tell(event: Event) -> None:
            file.write(encode(event) + b"\n")

        rounds = steps // LENGTH
        tell(_started(rounds))
        for number in range(1, rounds + 1):
            tell(
                EpisodeStarted(
                    time=float(number),
                    round=number,
                    task=["digits_shift"] * ENVS,
                    host_parameters=[438] * ENVS,
                )
            )
            for step in range(1, LENGTH + 1):
                tell(_decisions(draw, number, step))
                tell(_step(draw, number, step))
            for event in _end_of_round(draw, number):
                tell(event)
        tell(TrainingFinished(time=float(rounds), round=rounds, status="finished"))


def _floats(draw: random.Random, count: int = ENVS) -> list[float]:
    return [draw.random() for _ in range(count)]


def _started(rounds: int) -> TrainingStarted:
    return TrainingStarted(
        time=0.0,
        schema=3,
        round=0,
        rounds=rounds,
        tasks=["digits_shift"],
        policy="ppo",
        envs=ENVS,
        group_size=8,
        episode_length=LENGTH,
        slots=[[f"r0c{i}" for i in range(SLOTS)]],
        host_parameters=[438],
        device="cpu",
        amp_enabled=False,
        blueprints=list(BLUEPRINTS),
    )


def _decisions(draw: random.Random, number: int, step: int) -> DecisionsMade:
    return DecisionsMade(
        time=number + step / LENGTH,
        round=number,
        step=step,
        actions=[[0] * len(HEADS) for _ in range(ENVS)],
        legal_ops=[[Op.WAIT, Op.GERMINATE, Op.PRUNE] for _ in range(ENVS)],
        op_probability=[_floats(draw, len(Op)) for _ in range(ENVS)],
        log_prob=_floats(draw),
        value=_floats(draw),
    )


def _step(draw: random.Random, number: int, step: int) -> EpochCompleted:
    stage = LIFE[min(len(LIFE) - 1, 5 * step // LENGTH)]
    return EpochCompleted(
        time=number + step / LENGTH,
        round=number,
        step=step,
        train_loss=_floats(draw),
        train_accuracy=_floats(draw),
        validation_loss=_floats(draw),
        validation_accuracy=_floats(draw),
        expected_accuracy=_floats(draw),
        twin_validation_accuracy=_floats(draw),
        twin_expected_accuracy=_floats(draw),
        reward=_floats(draw),
        added_parameters=[draw.randrange(1000) for _ in range(ENVS)],
        op=[0] * ENVS,
        slot=[0] * ENVS,
        success=[True] * ENVS,
        stage=[[stage] * SLOTS for _ in range(ENVS)],
        blueprint=[[draw.randrange(1, 12) for _ in range(SLOTS)] for _ in range(ENVS)],
        alpha=[_floats(draw, SLOTS) for _ in range(ENVS)],
    )


def _end_of_round(draw: random.Random, number: int) -> list[Event]:
    metrics = {
        name: draw.random()
        for name in (Metric.POLICY_LOSS, Metric.VALUE_LOSS, Metric.ENTROPY, Metric.APPROX_KL)
    }
    for head in (*HEADS, "value"):
        metrics[part_metric(Metric.HEAD_GRAD_NORMS, head)] = draw.random()
        metrics[part_metric(Metric.HEAD_ENTROPY, head)] = draw.random()
    counts = [draw.randrange(3) for _ in range(ENVS)]
    return [
        PPOUpdateCompleted(time=number + 1.0, round=number, update=number, metrics=metrics),
        AnalyticsSnapshot(
            time=number + 1.0,
            round=number,
            amp_enabled=False,
            amp_dtype=None,
            learning_rate=1e-3,
            environment_steps_per_second=5000.0,
            rollout_seconds=1.0,
            update_seconds=0.5,
        ),
        EpisodeOutcome(
            time=number + 1.0,
            round=number,
            task=["digits_shift"] * ENVS,
            utility=_floats(draw),
            twin_utility=_floats(draw),
            accuracy=_floats(draw),
            twin_accuracy=_floats(draw),
            expected_accuracy=_floats(draw),
            twin_expected_accuracy=_floats(draw),
            episode_return=_floats(draw),
            added_parameters=counts,
            germinated=counts,
            fossilised=counts,
            pruned=counts,
            rolled_back=[0] * ENVS,
        ),
    ]


def opening(run: Path, size: tuple[int, int]) -> tuple[float, float]:
    """Seconds from the start of ``esper sanctum`` until the whole run is shown: wall, processor."""
    begin = time.perf_counter()
    process, terminal = pty.fork()
    if process == 0:
        os.environ["TERM"] = "xterm-256color"
        command = [sys.executable, "-m", "esper.scripts.main", "sanctum", str(run)]
        os.execv(sys.executable, command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
    shown = b""
    while "■ finished".encode() not in shown:
        if not select.select([terminal], [], [], 60.0)[0]:
            raise TimeoutError("Sanctum did not open")
        shown += os.read(terminal, 65536)
    seconds = time.perf_counter() - begin
    os.write(terminal, b"q")
    while True:
        try:
            os.read(terminal, 65536)
        except OSError:
            break
    usage = os.wait4(process, 0)[2]
    return seconds, usage.ru_utime + usage.ru_stime


async def frames(run: Path, size: tuple[int, int]) -> dict[str, list[tuple[float, float]]]:
    """Wall and processor seconds of frames, by page."""
    app = Sanctum(run)
    found: dict[str, list[tuple[float, float]]] = {}
    async with app.run_test(size=size) as pilot:
        while not app.loaded:
            await pilot.pause(0.05)
        for page in PAGES:
            app.action_page(page.title)
            await pilot.pause(0.3)
            found[page.title] = []
            for i in range(FRAMES):
                app.playhead.place = (i + 1) * STEPS // (FRAMES + 1)
                wall, processor = time.perf_counter(), time.process_time()
                app.draw()
                app.screen._compositor.render_strips()
                found[page.title].append(
                    (time.perf_counter() - wall, time.process_time() - processor)
                )
                await pilot.pause(0.1)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/")
    arguments = parser.parse_args()
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        write_run(run)
        size = (run / "events.jsonl").stat().st_size / 2**20
        lines.append(f"The event file has {size:.0f} MiB.\n")
        for columns, rows in SIZES:
            took = [opening(run, (columns, rows)) for _ in range(3)]
            wall, processor = (median(part) for part in zip(*took, strict=True))
            lines.append(
                f"Opening at {columns}x{rows}: {wall:.2f} s ({processor:.2f} s of processor time), "
                "median of 3.\n"
            )
        lines += [
            "| page | terminal | median | 95 % | processor, median |",
            "|---|---|---|---|---|",
        ]
        for columns, rows in SIZES:
            for page, took in asyncio.run(frames(run, (columns, rows))).items():
                wall, processor = (sorted(part) for part in zip(*took, strict=True))
                lines.append(
                    f"| {page} | {columns}x{rows} | {1e3 * median(wall):.0f} ms "
                    f"| {1e3 * wall[int(0.95 * len(wall))]:.0f} ms "
                    f"| {1e3 * median(processor):.0f} ms |"
                )
    text = "\n".join(lines)
    print(text)
    if arguments.write:
        (RESULTS / "sanctum.md").write_text(
            "# Sanctum on a run of a million environment steps\n\n`make bench-sanctum`\n\n"
            f"{text}\n\n{made_on()}; other work was running beside it.\n"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
