"""Environment steps per second of the whole training loop, against a naive loop.

    python scripts/benchmark_hot_path.py
    python scripts/benchmark_hot_path.py --task pixels --envs 16 --json pixels.json
    python scripts/benchmark_hot_path.py --compare before.json after.json

A loop trains, validates and ablates the hosts, runs the policy, learns from the episode (PPO) and
writes telemetry. It is compared with a ``naive`` loop whose hosts are ordinary modules, one per
environment, in a Python loop, with fused AdamW and the same allocator settings. The naive loop uses
the same minibatches and must compute the same numbers, which is checked first. It takes part in
every way of ``hot_path_race.NaiveWays``: one process with all threads and one single-threaded
process per core, each in NCHW, NHWC and NHWC with bfloat16, and per core compiled too
(``--formats`` chooses fewer). All loops take their turn in every round, and the fastest naive way
of each round counts. On a busy machine it refuses to race, unless ``--busy`` is given. For the
workload, see ``benchmarks/hot_path_workload.py``.
"""

import argparse
import json
import os
import shlex
import sys
import time
import timeit
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.flop_counter import FlopCounterMode

from esper.leyline.config.groups import MachineConfig
from esper.runtime.tasks import find_all
from esper.simic.loss import resolve_mode
from esper.simic.training.setup import arithmetic
from esper.tolaria.precision import resolve_precision

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from hot_path_race import FORMATS, ROUND, Naive, NaiveWays, best_naive, naive_loop, race
from hot_path_workload import Loop, Workload, machine, wait_for
from reporting import table

from oracles.naive import naive_host

CHECKED_STEPS, CHECKED_RATE = 12, 5e-3
MOST_OTHERS = 0.1
COMPILE_MODES = get_args(get_type_hints(MachineConfig)["compile"])


def check_same_numbers(workload: Workload, backend: str) -> None:
    """Check before timing that both loops compute the same losses, also with seeds.

    Uses one minibatch per step and a small learning rate, because rounding differences grow with
    every update.
    """
    few = min(8, workload.envs)
    short = replace(
        workload, episode_length=CHECKED_STEPS, envs=few, max_batches=1, learning_rate=CHECKED_RATE
    )
    loops = [Loop(short, backend), naive_loop(short, threads=1)]
    for loop in loops:
        loop.begin()
    for _ in range(CHECKED_STEPS):
        ours, naive = (loop.step().report for loop in loops)
        pairs = [(r.train_loss, r.scores.loss, r.signals.contribution) for r in (ours, naive)]
        for a, b in zip(*pairs, strict=True):
            torch.testing.assert_close(a.cpu(), b.cpu(), rtol=5e-3, atol=5e-3, equal_nan=True)
    assert bool(ours.signals.contribution.isfinite().any()), "no seed acts after all checked steps"
    for loop in loops:
        loop.close()


def measure(
    workloads: dict[str, Workload], episodes: int, use_amp: bool, formats: Sequence[str]
) -> list[dict[str, Any]]:
    """Race the loops of all backends with the naive loop; return a row per backend.

    Args:
        workloads: the workload of each backend; they differ in their precision alone.
        episodes: timed episodes.
        use_amp: whether our hosts compute in half precision; the numbers are then not compared.
        formats: those of the naive loop; without any it takes no part, and there is no ratio.
    """
    if formats and not use_amp:
        for backend, workload in workloads.items():
            check_same_numbers(workload, backend)
    workload = next(iter(workloads.values()))
    ours = {backend: Loop(own, backend) for backend, own in workloads.items()}
    if not formats:
        seconds = race({**ours}, workload, episodes)
        return [result(loop, seconds, seconds[backend], None) for backend, loop in ours.items()]
    with NaiveWays(workload, formats) as naive:
        seconds = race({**ours, **naive.contenders}, workload, episodes)
        best = best_naive(seconds, list(naive.contenders))
    return [result(loop, seconds, seconds[backend], best) for backend, loop in ours.items()]


def result(
    loop: Loop,
    seconds: dict[str, NDArray[np.float64]],
    taken: NDArray[np.float64],
    naive: Naive | None,
) -> dict[str, Any]:
    """Return the row of a loop, which it closes.

    Args:
        loop: the loop.
        seconds: seconds of every round by contender.
        taken: seconds of this loop's rounds, ``[R]``.
        naive: the naive loop; None if it took no part.
    """
    workload, total = loop.workload, float(taken.sum())
    growth = loop.environment.config
    steps = workload.envs * len(loop.steps)
    milliseconds = 1e3 * np.array(loop.steps)
    rows = sum(len(shard.engine.rows) for shard in loop.environment.shards)
    shares = {"host": loop.host, "policy": loop.policy, "update": loop.update}
    shares["rest"] = total - sum(shares.values())
    loop.close()
    given = ("task", "envs", "episode_length", "device", "telemetry", "lstm_hidden", "ppo_epochs")
    device = torch.device(workload.device)
    return {
        **{name: getattr(workload, name) for name in (*given, "threads")},
        "max_batches": growth.max_batches,
        "batch_size": growth.batch_size,
        "backend": loop.backend_name,
        "amp": workload.precision.enabled,
        "compile": workload.compile_mode,
        "eps": steps / total,
        "step_ms_p50": float(np.percentile(milliseconds, 50)),
        "step_ms_p95": float(np.percentile(milliseconds, 95)),
        "hosts": rows,
        **beside(naive, seconds, taken, steps),
        "rounds": len(taken),
        **{f"share_{part}": own / total for part, own in shares.items()},
        "peak_gflops": peak_gflops(device, workload.threads),
        "host_gflops": host_flops(workload) * rows / workload.envs * steps / loop.host / 1e9,
        **machine(device),
    }


def beside(
    naive: Naive | None,
    seconds: dict[str, NDArray[np.float64]],
    taken: NDArray[np.float64],
    steps: int,
) -> dict[str, Any]:
    """Return the columns about the naive loop, None if it took no part; see ``result``."""
    if naive is None:
        names = ("naive_eps", "naive_way", "ratio", "lowest_ratio", "highest_ratio")
        return dict.fromkeys(names) | {"ways": {}}
    by_round = naive.fastest / taken
    return {
        "naive_eps": steps / float(naive.fastest.sum()),
        "naive_way": naive.way,
        "ratio": float(naive.fastest.sum()) / float(taken.sum()),
        "lowest_ratio": float(by_round.min()),
        "highest_ratio": float(by_round.max()),
        "ways": {
            way: {"eps": steps / float(seconds[way].sum()), "won": won}
            for way, won in naive.won.items()
        },
    }


def peak_gflops(device: torch.device, threads: int) -> float:
    """Measure a large matrix product, in 10^9 operations per second.

    On a CPU so many threads compute it; on CUDA it is computed in TF32 if the loop uses it.
    """
    size = 1024 if device.type == "cpu" else 8192
    torch.set_num_threads(threads)
    a, b = (torch.randn(size, size, device=device) for _ in range(2))

    def product() -> None:
        a @ b
        wait_for(device)

    best = min(timeit.repeat(product, number=1, repeat=20))
    torch.set_num_threads(1)
    return 2 * size**3 / best / 1e9


def host_flops(workload: Workload) -> float:
    """Return the multiplications and additions of a bare host's layers per environment step.

    Counts forward and backward of every minibatch, and forward of the validation images. Seeds,
    norms and pools are left out, so the figure is a lower bound.
    """
    host, growth = workload.found.host, workload.growth("torch")
    height, width, channels = host.image
    module = naive_host(host)

    def forward() -> torch.Tensor:
        logits: torch.Tensor = module(torch.zeros(2, channels, height, width), {})
        return logits

    with FlopCounterMode(display=False) as validation:
        forward()
    with FlopCounterMode(display=False) as training:
        forward().sum().backward()
    images = len(workload.found.datasets()[0].validation_labels)
    trained = growth.max_batches * growth.batch_size
    return (training.get_total_flops() * trained + validation.get_total_flops() * images) / 2


def share_of_others(seconds: float = 1.0) -> float:
    """Return the share of the processors that is in use while this process sleeps.

    0 where the system has no ``/proc/stat``.
    """
    file = Path("/proc/stat")
    if not file.exists():
        return 0.0

    def ticks() -> tuple[int, int]:
        counts = [int(count) for count in file.read_text().splitlines()[0].split()[1:9]]
        return sum(counts), counts[3] + counts[4]  # idle and waiting for disks

    total, idle = ticks()
    time.sleep(seconds)
    later, later_idle = ticks()
    return 1 - (later_idle - idle) / max(later - total, 1)


def page(rows: list[dict[str, Any]]) -> str:
    """Return the results in Markdown: the loops, then every naive way."""
    parts = ("host", "policy", "update", "rest")
    heads = ("task", "envs", "backend", "env steps/s", "naive", "ratio", "ratio of single rounds")
    lines = [
        (
            *(r["task"], r["envs"], r["backend"], f"{r['eps']:,.0f}"),
            *ratios(r),
            *(f"{r[name]:.1f}" for name in ("step_ms_p50", "step_ms_p95")),
            *(f"{100 * r[f'share_{part}']:.0f} %" for part in parts),
            f"{r['host_gflops']:.0f} of {r['peak_gflops']:.0f}",
        )
        for r in rows
    ]
    twins, times = "ratio if naive twins took no time", ("step ms p50", "p95")
    loops = table((*heads, twins, *times, *parts, "host GFLOP/s of peak"), lines)
    return f"{loops}\n\n{ways_table(rows)}" if rows[0]["ways"] else loops


def ratios(row: dict[str, Any]) -> tuple[str, str, str, str]:
    """Return the columns of the naive loop and of the ratio to it; dashes if it took no part.

    The last is the ratio if a naive loop took no time at all for the twins of groups.
    """
    if row["ratio"] is None:
        return "-", "-", "-", "-"
    single = f"{row['lowest_ratio']:.1f} to {row['highest_ratio']:.1f}"
    without = f"{row['ratio'] * row['envs'] / row['hosts']:.1f}"
    return f"{row['naive_eps']:,.1f}", f"{row['ratio']:.1f}", single, without


def ways_table(rows: list[dict[str, Any]]) -> str:
    """Return the naive ways of each race in Markdown, with the ratio of every loop to each."""
    races: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        races.setdefault((row["task"], row["envs"]), []).append(row)
    backends = list(dict.fromkeys(row["backend"] for row in rows))
    lines = []
    for (task, envs), own in races.items():
        for way, found in own[0]["ways"].items():
            ratios = (f"{row['eps'] / found['eps']:.1f}" for row in own)
            won = f"{found['won']} of {own[0]['rounds']}"
            lines.append((task, envs, way, f"{found['eps']:,.1f}", won, *ratios))
    heads = ("task", "envs", "naive way", "env steps/s", "rounds in which it is the fastest")
    return table((*heads, *(f"ratio of {backend}" for backend in backends)), lines)


def compared(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> str:
    """Compare the rows of two files in Markdown.

    A row without a partner of its own precision and compilation is compared with one of another.
    """
    names, ways = ("task", "envs", "backend", "device", "telemetry", "threads"), ("amp", "compile")

    def key_of(row: dict[str, Any], names: tuple[str, ...]) -> tuple[Any, ...]:
        return tuple(row[name] for name in names)

    exact = {key_of(row, (*names, *ways)): row for row in before}
    similar = {key_of(row, names): row for row in before}
    lines = []
    for row in after:
        other = exact.get(key_of(row, (*names, *ways))) or similar.get(key_of(row, names))
        if other is not None:
            differences = (
                f"{other[way]}" if other[way] == row[way] else f"{other[way]} -> {row[way]}"
                for way in ways
            )
            speeds = (f"{r['eps']:,.0f}" for r in (other, row))
            naive = (ratios(r)[1] for r in (other, row))
            ratio = f"{row['eps'] / other['eps']:.2f}"
            lines.append((*key_of(row, names), *differences, *speeds, ratio, *naive))
    heads = (*names, *ways, "before", "after", "after / before", "ratio of naive, before", "after")
    return table(heads, lines)


def command_line() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--task", default="digits_shift")
    parser.add_argument("--envs", type=int, nargs="+", default=[64])
    parser.add_argument("--max-batches", type=int)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--episode-length", type=int, help="default: the task's own")
    parser.add_argument("--episodes", type=int, default=2, help="timed episodes")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--amp", action="store_true")
    parser.add_argument(
        "--tf32", action=argparse.BooleanOptionalAction, default=True, help="as in training"
    )
    parser.add_argument(
        "--formats",
        nargs="+",
        default=[*FORMATS],
        choices=FORMATS,
        metavar="FORMAT",
        help="formats of the naive loop: %(choices)s",
    )
    parser.add_argument(
        "--no-naive",
        dest="formats",
        action="store_const",
        const=[],
        default=argparse.SUPPRESS,
        help="race without the naive loop",
    )
    parser.add_argument(
        "--compile",
        default="auto",
        choices=COMPILE_MODES,
        help="compilation of the policy's update",
    )
    parser.add_argument("--backend", nargs="+", default=["native", "torch"])
    parser.add_argument("--telemetry", default="normal")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="file for the rows; a table is written beside it")
    parser.add_argument("--busy", action="store_true", help="race beside other work all the same")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("A", "B"))
    return parser.parse_args()


def main() -> int:
    """Run the benchmark, or compare two results; return the exit status."""
    arguments = command_line()
    if arguments.compare:
        before, after = (json.loads(path.read_text()) for path in arguments.compare)
        print(compared(before, after))
        return 0
    if not arguments.busy and (share := share_of_others()) > MOST_OTHERS:
        print(
            f"error: other programs use {share:.0%} of the processors, which would spoil the "
            "ratios; wait until they end, or give --busy",
            file=sys.stderr,
        )
        return 2
    torch.set_num_threads(1)
    device = torch.device(arguments.device)
    (task,) = find_all([arguments.task])
    given = ("task", "max_batches", "batch_size", "device", "telemetry", "threads")
    workload = Workload(
        **{name: getattr(arguments, name) for name in given},
        episode_length=arguments.episode_length or task.episode_length,
        compile_mode=resolve_mode(arguments.compile, device),
    )
    rows = []
    for envs in arguments.envs:
        workloads = {
            backend: replace(
                workload,
                envs=envs,
                precision=resolve_precision(arguments.amp, device, backend=backend),
            )
            for backend in arguments.backend
        }
        with arithmetic(device, 1, arguments.tf32):
            rows += measure(workloads, arguments.episodes, arguments.amp, arguments.formats)
        print(f"{envs} environments done", file=sys.stderr, flush=True)
    print(page(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")
        row = rows[0]
        text = (
            f"`python scripts/benchmark_hot_path.py {shlex.join(sys.argv[1:])}`\n\n{page(rows)}\n\n"
            f"All loops take {ROUND} steps in every round; {arguments.episodes} timed episodes of "
            f"{workload.episode_length} steps. The column naive, and the ratio to it, take the "
            "fastest naive way of each round; N x 1 thread are N processes that divide the "
            f"environments. torch {row['torch']}, {row['device_name']}, "
            f"{row['threads']} threads, {time.strftime('%Y-%m-%d')}.\n"
        )
        arguments.json.with_suffix(".md").write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
