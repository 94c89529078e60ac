"""How fast is one training step of N hosts, against one ordinary module per host in a loop?

    python benchmarks/training_step.py            # N = 64 on digits_shift, one process
    python benchmarks/training_step.py --envs 16 64 256

A step is forward, backward, clipping and AdamW on one minibatch of every host, no seeds. Both sides
start from the same numbers, see the same images, and their losses are compared before anything is
timed. The loop is given its best of {1, 2} threads and {NCHW, channels_last}, with fused AdamW and
the same allocator settings; the stacked step its best number of threads. Rounds of both are
interleaved, so that drift of the machine's speed falls on both. Medians.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from machine import made_on
from torch import Tensor, nn

from esper.kasmina.seeds import SeedState
from esper.runtime.tasks import find
from esper.tolaria.backends.torch import TorchBackend
from esper.tolaria.bank import DataBank
from esper.tolaria.engine import Engine, Rows
from esper.tolaria.minibatches import Minibatches
from esper.tolaria.plan import Seeds
from esper.tolaria.precision import Precision

RESULTS = Path(__file__).parent / "results"


def naive_hosts(engine: Engine) -> list[nn.Module]:
    """One ordinary module per environment with the engine's parameters."""
    hosts = []
    views = engine.host.layout.views(engine.stack.host)
    for i in range(len(engine.rows)):
        layers: list[nn.Module] = []
        inputs = engine.host.image[2]
        for block, channels in enumerate(engine.host.channels):
            kernel = engine.host.kernel
            conv = nn.Conv2d(inputs, channels, kernel, padding=kernel // 2, bias=False)
            norm = nn.BatchNorm2d(channels)
            with torch.no_grad():
                conv.weight.copy_(views[f"conv{block}.weight"][i])
            layers += [conv, norm, nn.ReLU()]
            inputs = channels
        head = nn.Linear(inputs, engine.host.classes)
        with torch.no_grad():
            head.weight.copy_(views["head.weight"][i])
            head.bias.copy_(views["head.bias"][i])
        hosts.append(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head))
    return hosts


class NaiveLoop:
    """The obvious way: a Python loop over modules."""

    def __init__(self, engine: Engine, images: Tensor, labels: Tensor, channels_last: bool):
        layout = torch.channels_last if channels_last else torch.contiguous_format
        self.hosts = [host.to(memory_format=layout) for host in naive_hosts(engine)]
        rate = engine.optimisation.host_learning_rate[0].item()
        self.optimizers = [
            torch.optim.AdamW(host.parameters(), rate, weight_decay=0.0, fused=True)
            for host in self.hosts
        ]
        per_host = images.permute(3, 0, 4, 1, 2)
        self.images = [x.contiguous(memory_format=layout) for x in per_host]
        self.labels = list(labels)
        self.max_norm = engine.optimisation.max_gradient_norm

    def step(self) -> Tensor:
        losses = []
        for host, optimizer, images, labels in zip(
            self.hosts, self.optimizers, self.images, self.labels, strict=True
        ):
            optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.cross_entropy(host(images), labels)
            loss.backward()
            nn.utils.clip_grad_norm_(host.parameters(), self.max_norm)
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses)


class Stacked:
    """Esper's torch backend."""

    def __init__(self, engine: Engine, minibatches: Minibatches):
        self.engine, self.minibatches = engine, minibatches
        state = SeedState.dormant((len(engine.rows), len(engine.slots)), engine.device)
        self.seeds = Seeds.training(state)

    def step(self) -> Tensor:
        result = self.engine.backend.train_epoch(
            self.engine.stack, self.seeds, self.minibatches, self.engine.optimisation
        )
        return result.loss


def build(task_name: str, envs: int) -> tuple[Engine, Minibatches]:
    """An engine and one minibatch for each of its hosts."""
    task = find(task_name)
    rows = Rows(torch.arange(envs), torch.arange(envs))
    bank = DataBank([(task, task.datasets())], torch.float32, torch.device("cpu"))
    engine = Engine(bank, rows, 1, TorchBackend(task.host, Precision("cpu")), 1, task.batch_size)
    engine.reset(0)
    return engine, engine.minibatches(0)


def seconds(step: Callable[[], Tensor], threads: int) -> float:
    torch.set_num_threads(threads)
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def measure(task: str, envs: int, repeats: int, threads: list[int]) -> dict:
    """Median milliseconds of both ways, and their ratio."""
    engine, minibatches = build(task, envs)
    images, labels = next(iter(minibatches))
    loops = {cl: NaiveLoop(engine, images, labels, cl) for cl in (False, True)}
    stacked = Stacked(engine, minibatches)
    reference = [loops[False].step() for _ in range(3)]
    ours = [stacked.step() for _ in range(3)]
    for a, b in zip(reference, ours, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)

    ways = {
        f"naive {t} threads {'NHWC' if cl else 'NCHW'}": (loops[cl].step, t)
        for cl in loops
        for t in threads
    }
    ways |= {f"stacked {t} threads": (stacked.step, t) for t in threads}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, (step, count) in ways.items():
            times[name].append(seconds(step, count))
    medians = {name: 1e3 * statistics.median(values[1:]) for name, values in times.items()}
    naive = min(v for name, v in medians.items() if name.startswith("naive"))
    best = min(v for name, v in medians.items() if name.startswith("stacked"))
    return {
        "task": task,
        "envs": envs,
        "naive_ms": naive,
        "stacked_ms": best,
        "ratio": naive / best,
        "all_ms": medians,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", default="digits_shift")
    parser.add_argument("--envs", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/")
    arguments = parser.parse_args()
    rows = [
        measure(arguments.task, n, arguments.repeats, arguments.threads) for n in arguments.envs
    ]
    lines = ["| task | N | naive loop, ms | stacked, ms | ratio |", "|---|---|---|---|---|"]
    lines += [
        "| {task} | {envs} | {naive_ms:.1f} | {stacked_ms:.1f} | {ratio:.1f} |".format(**row)
        for row in rows
    ]
    print("\n".join(lines))
    if arguments.write:
        RESULTS.mkdir(exist_ok=True)
        text = (
            "# One training step, stacked against a loop\n\n`make bench-step`\n\n"
            + "\n".join(lines)
            + f"\n\nMedians of {arguments.repeats - 1} interleaved steps on the CPU, "
            + f"{made_on(f'best of {arguments.threads} threads')}.\n"
        )
        (RESULTS / "training_step.md").write_text(text)
        (RESULTS / "training_step.json").write_text(json.dumps(rows, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
