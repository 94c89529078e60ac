"""Environment steps per second of the whole training loop, beside the obvious way.

    python scripts/benchmark_hot_path.py
    python scripts/benchmark_hot_path.py --task pixels --envs 16 --json pixels.json
    python scripts/benchmark_hot_path.py --compare before.json after.json

A loop trains, validates and ablates the hosts, runs the policy, learns from the episode (PPO) and
writes telemetry. Next to it runs a ``naive`` loop in which the hosts are ordinary modules, one an
environment, in a Python loop: same minibatches and same numbers, which is checked first, in the
best of {1, 2, all threads} x {NCHW, NHWC} with fused AdamW and the same allocator settings. Both
take turns of a few steps, so that drift of the machine falls on both and each finds its own data in
the cache, as it would alone. For the workload see ``hot_path_workload.py``.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from hot_path_naive import NaiveBackend, choose_best
from hot_path_workload import Loop, Timed, Workload

from esper.kasmina.hosts.cnn import CnnHost
from esper.kasmina.seeds import SeedState
from esper.runtime.registry import find_all
from esper.simic.compiled import MODES, resolve_mode
from esper.simic.run.run_directory import processor_name
from esper.tolaria.plan import Seeds
from esper.tolaria.precision import resolve_precision

CHECKED_STEPS = 12
TURN = 10
"""Steps that a loop takes before it is the other's turn."""


def build(workload: Workload, backend: str) -> Loop:
    """The loop of one mode. The naive one is put into its best way."""
    if backend != "naive":
        return Loop(workload, backend)
    return Loop(workload, "torch", instead=NaiveBackend)


def prepare(loop: Loop) -> str:
    """Let a naive loop choose its way on numbers that are thrown away."""
    loop.begin()
    engine = loop.environment.shards[0].engine
    backend = engine.backend.backend if isinstance(engine.backend, Timed) else engine.backend
    assert isinstance(backend, NaiveBackend)
    state = SeedState.dormant((len(engine.rows), len(engine.slots)), engine.device)
    return choose_best(
        backend,
        engine.stack,
        Seeds.training(state),
        engine.minibatches(0),
        engine.optimisation,
        loop.workload.threads,
    )


def check_same_numbers(workload: Workload, backend: str) -> None:
    """Both loops must find the same losses, seeds included, before anything is timed.

    One minibatch a step: rounding grows with every update until the two are different runs.
    """
    few = min(8, workload.envs)
    short = replace(workload, episode_length=CHECKED_STEPS, envs=few, max_batches=1)
    loops = [build(short, name) for name in (backend, "naive")]
    for loop in loops:
        loop.begin()
    for _ in range(CHECKED_STEPS):
        ours, naive = (loop.step().report for loop in loops)
        pairs = [(r.train_loss, r.scores.loss, r.signals.contribution) for r in (ours, naive)]
        for a, b in zip(*pairs, strict=True):
            torch.testing.assert_close(a.cpu(), b.cpu(), rtol=5e-3, atol=5e-3, equal_nan=True)
    assert bool(ours.signals.contribution.isfinite().any()), "a seed should act by now"
    for loop in loops:
        loop.close()


def measure(workload: Workload, backend: str, episodes: int, use_amp: bool) -> dict:
    """Both loops in turns; a row of the table."""
    if not use_amp:
        check_same_numbers(workload, backend)
    ours, naive = build(workload, backend), build(workload, "naive")
    way = prepare(naive)
    for episode in range(-1, episodes):
        if episode == 0:
            for loop in (ours, naive):
                loop.clear()
        # A compiled update is timed on episodes of one length, so the first must have it too.
        whole = episode >= 0 or workload.compile_mode != "off"
        length = workload.episode_length if whole else min(2, workload.episode_length)
        for loop in (ours, naive):
            loop.begin()
        for begin in range(0, length, TURN):
            for loop in (ours, naive):
                for _ in range(begin, min(begin + TURN, length)):
                    loop.step()
        if whole:
            for loop in (ours, naive):
                loop.end()
    growth = workload.growth(backend)
    steps = workload.envs * workload.episode_length * episodes
    total, peak = ours.seconds, peak_gflops(workload.threads)
    milliseconds = 1e3 * np.array(ours.steps)
    rest = total - ours.host - ours.policy - ours.update
    rows = sum(len(shard.engine.rows) for shard in ours.environment.shards)
    flops = host_flops(workload, rows)
    row = {
        "task": workload.task,
        "envs": workload.envs,
        "episode_length": workload.episode_length,
        "max_batches": growth.max_batches,
        "batch_size": growth.batch_size,
        "backend": ours.backend_name,
        "device": workload.device,
        "amp": workload.precision.enabled,
        "compile": workload.compile_mode,
        "telemetry": workload.telemetry,
        "lstm_hidden": workload.lstm_hidden,
        "ppo_epochs": workload.ppo_epochs,
        "threads": workload.threads,
        "eps": steps / total,
        "step_ms_p50": float(np.percentile(milliseconds, 50)),
        "step_ms_p95": float(np.percentile(milliseconds, 95)),
        "naive_eps": steps / naive.seconds,
        "naive_way": way,
        "ratio": naive.seconds / total,
        "share_host": ours.host / total,
        "share_policy": ours.policy / total,
        "share_update": ours.update / total,
        "share_rest": rest / total,
        "peak_gflops": peak,
        "host_gflops": flops * workload.episode_length * episodes / ours.host / 1e9,
        **machine(workload.device),
    }
    for loop in (ours, naive):
        loop.close()
    return row


def peak_gflops(threads: int) -> float:
    """What a large matrix product reaches here on so many threads, 10^9 operations a second."""
    size = 1024
    torch.set_num_threads(threads)
    a, b = torch.randn(size, size), torch.randn(size, size)
    best = min(_seconds(lambda: a @ b) for _ in range(20))
    torch.set_num_threads(1)
    return 2 * size**3 / best / 1e9


def _seconds(call: object) -> float:
    begin = time.perf_counter()
    call()  # type: ignore[operator]
    return time.perf_counter() - begin


def host_flops(workload: Workload, rows: int) -> float:
    """Multiplications and additions of the bare hosts' layers in an environment step.

    Three passes a layer in training, two in the first, which has no input gradient; one in
    validation. Seeds, norms and pools are left out, so the figure errs on the low side.
    """
    host, growth = workload.found.host, workload.growth("torch")
    data = workload.found.datasets()[0]
    trained = growth.max_batches * growth.batch_size
    validated = len(data.validation_labels)
    total = 0.0
    if isinstance(host, CnnHost):
        height, width, inputs = host.image
        for block, outputs in enumerate(host.channels):
            macs = height * width * inputs * outputs * host.kernel**2
            total += 2 * macs * ((2 if block == 0 else 3) * trained + validated)
            inputs = outputs
            if block < host.pools:
                height, width = height // 2, width // 2
    else:
        inputs = host.image[0] * host.image[1] * host.image[2]
        for block, outputs in enumerate(host.widths):
            macs = inputs * outputs
            total += 2 * macs * ((2 if block == 0 else 3) * trained + validated)
            inputs = outputs
    total += 2 * inputs * host.classes * (3 * trained + validated)
    return total * rows


def machine(device: str) -> dict:
    """What a figure must be read with."""
    cuda = device.startswith("cuda")
    driver = None
    if cuda:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    git = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "torch": torch.__version__,
        "device_name": torch.cuda.get_device_name(device)
        if cuda
        else f"{os.cpu_count()} x {processor_name()}",
        "driver": driver,
        "cuda": torch.version.cuda,
        "git": git or None,
    }


def table(rows: list[dict]) -> str:
    """The results in Markdown."""
    lines = [
        "| task | envs | backend | env steps/s | naive | ratio | step ms p50 | p95 "
        "| host | policy | update | rest | host GFLOP/s of peak |",
        "|" + "---|" * 13,
    ]
    for r in rows:
        shares = " | ".join(
            f"{100 * r[f'share_{part}']:.0f} %" for part in ("host", "policy", "update", "rest")
        )
        lines.append(
            f"| {r['task']} | {r['envs']} | {r['backend']} | {r['eps']:,.0f} "
            f"| {r['naive_eps']:,.1f} ({r['naive_way']}) | {r['ratio']:.1f} "
            f"| {r['step_ms_p50']:.1f} | {r['step_ms_p95']:.1f} | {shares} "
            f"| {r['host_gflops']:.0f} of {r['peak_gflops']:.0f} |"
        )
    return "\n".join(lines)


def compared(before: list[dict], after: list[dict]) -> str:
    """Two files row by row."""
    names = ("task", "envs", "backend", "device", "amp", "compile", "telemetry", "threads")
    lines = [
        f"| {' | '.join(names)} | before | after | ratio of naive, before | after |",
        "|" + "---|" * 12,
    ]
    known = {tuple(row[name] for name in names): row for row in before}
    for row in after:
        key = tuple(row[name] for name in names)
        if key in known:
            then = known[key]
            lines.append(
                f"| {' | '.join(map(str, key))} | {then['eps']:,.0f} | {row['eps']:,.0f} "
                f"| {then['ratio']:.1f} | {row['ratio']:.1f} |"
            )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", default="digits_shift")
    parser.add_argument("--envs", type=int, nargs="+", default=[64])
    parser.add_argument("--max-batches", type=int)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--episode-length", type=int, help="the task's own when not given")
    parser.add_argument("--episodes", type=int, default=2, help="timed ones")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--compile", default="auto", choices=MODES, help="of the policy's update")
    parser.add_argument("--backend", nargs="+", default=["native", "torch"])
    parser.add_argument("--telemetry", default="normal")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="where to write the rows; a table lies beside")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("A", "B"))
    arguments = parser.parse_args()
    if arguments.compare:
        before, after = (json.loads(path.read_text()) for path in arguments.compare)
        print(compared(before, after))
        return 0
    torch.set_num_threads(1)
    device = torch.device(arguments.device)
    (task,) = find_all([arguments.task])
    length = arguments.episode_length or task.episode_length
    rows = []
    for envs in arguments.envs:
        for backend in arguments.backend:
            workload = Workload(
                task=arguments.task,
                envs=envs,
                episode_length=length,
                max_batches=arguments.max_batches,
                batch_size=arguments.batch_size,
                device=arguments.device,
                precision=resolve_precision(arguments.amp, device, backend=backend),
                telemetry=arguments.telemetry,
                threads=arguments.threads,
                compile_mode=resolve_mode(arguments.compile, device),
            )
            rows.append(measure(workload, backend, arguments.episodes, arguments.amp))
            print(f"{backend} done", file=sys.stderr, flush=True)
    print(table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")
        row = rows[0]
        page = (
            f"`python scripts/benchmark_hot_path.py {' '.join(sys.argv[1:])}`\n\n{table(rows)}\n\n"
            f"Whole loops in turns of {TURN} steps, {arguments.episodes} timed episodes of "
            f"{length} steps. torch {row['torch']}, {row['device_name']}, "
            f"{row['threads']} threads, {time.strftime('%Y-%m-%d')}.\n"
        )
        arguments.json.with_suffix(".md").write_text(page)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
