"""What growth costs a module of one's own while no seed is alive, beside the plain loop.

    python benchmarks/own_models.py --write             # about five minutes on one free core

Epochs of the two loops alternate in which comes first, each with its own copy of the module, and
the result is the median ratio of their processor times. An epoch trains on two minibatches and
validates on one. Growth looks for slots, keeps the lifecycle and asks a policy that always waits.
Peak memory is that of a process that runs one of the loops.
"""

import copy
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from own_model_nets import ResNet18
from reporting import made_on, new_parser, publish, table
from torch import Tensor, nn
from torch.optim import AdamW

from esper.kasmina.wider_layers import parameter_count
from esper.own_models.controller import Growth
from esper.own_models.model_check import check
from esper.own_models.objectives import Evaluator, objective
from esper.own_models.training_loop import Training
from esper.tamiyo.baselines import NeverActor
from esper.tolaria.memory import peak_resident

TIME_LIMIT, MEMORY_LIMIT = 1.10, 1.30
"""Largest ratios to the plain loop that are accepted."""
CHECK_LIMIT, CHECK_SECONDS = 1.5, 20.0
"""Largest peak of the check, as a ratio to that of the plain loop, and its longest time."""
EPOCHS = 1000
"""More than are run, so that growth does not end."""
Batch = tuple[Tensor, Tensor]


class Transformer(nn.Module):
    """A language model of torch's encoder layers under a causal mask."""

    def __init__(self, vocabulary: int = 96, width: int = 128, depth: int = 4):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True) for _ in range(depth)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``[B, T, vocabulary]`` of the next tokens."""
        x = self.embedding(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)


def _images() -> list[Batch]:
    return [(torch.randn(16, 3, 32, 32), torch.randint(10, (16,))) for _ in range(2)]


def _text() -> list[Batch]:
    found = [torch.randint(96, (16, 65)) for _ in range(2)]
    return [(x[:, :-1], x[:, 1:]) for x in found]


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], list[Batch]]]] = {
    "ResNet-18": (ResNet18, _images),
    "transformer": (Transformer, _text),
}


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of the last axis."""
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def plain_loop(model: nn.Module, batches: list[Batch]) -> Callable[[], None]:
    """An epoch as people write it."""
    optimizer = AdamW(model.parameters(), lr=1e-4)

    def epoch() -> None:
        model.train()
        total = 0.0
        for x, y in batches:
            optimizer.zero_grad()
            found = loss(model(x), y)
            found.backward()
            optimizer.step()
            total += found.item()
        model.eval()
        with torch.no_grad():
            for x, y in batches[:1]:
                logits = model(x)
                total += float(loss(logits, y)) + float((logits.argmax(-1) == y).float().mean())

    return epoch


def growing_loop(model: nn.Module, batches: list[Batch]) -> Callable[[], None]:
    """An epoch of ``esper.grow`` in which nothing grows."""
    optimizer, cpu, goal = AdamW(model.parameters(), lr=1e-4), torch.device("cpu"), objective(loss)
    training = Training(model, batches, objective("cross_entropy"), optimizer, cpu)
    validate = Evaluator(model, batches[:1], goal, cpu)
    growth = Growth(
        model,
        optimizer,
        policy=NeverActor(),
        epochs=EPOCHS,
        validate=validate,
        example=batches[0][0],
        report=None,
    )

    def epoch() -> None:
        trained = training.epoch()
        growth.step(validate(), train_loss=trained)

    return epoch


LOOPS = {"plain": plain_loop, "growth": growing_loop}


def measured(case: str, pairs: int) -> dict[str, Any]:
    """The median ratio of the times of an epoch, and the seconds of the plain one."""
    build, data = CASES[case]
    torch.manual_seed(0)
    model, batches = build(), data()
    epochs = {name: loop(copy.deepcopy(model), batches) for name, loop in LOOPS.items()}
    ratios, plain = [], []
    for pair in range(pairs + 1):
        seconds = {}
        for name in ("plain", "growth") if pair % 2 else ("growth", "plain"):
            begun = time.process_time()
            epochs[name]()
            seconds[name] = time.process_time() - begun
        if pair:
            ratios.append(seconds["growth"] / seconds["plain"])
            plain.append(seconds["plain"])
    return {
        "model": case,
        "parameters": parameter_count(model),
        "pairs": pairs,
        "seconds": statistics.median(plain),
        "ratio": statistics.median(ratios),
    }


def run_alone(case: str, what: str) -> None:
    """Run three epochs of one loop, or the check; print its seconds and peak memory in MiB."""
    build, data = CASES[case]
    torch.manual_seed(0)
    model, batches = build(), data()
    begun = time.perf_counter()
    if what == "check":
        check(model, batches, progress=False)
    else:
        epoch = LOOPS[what](model, batches)
        for _ in range(3):
            epoch()
    print(time.perf_counter() - begun, (peak_resident() or 0) / 2**20)


def alone(case: str, what: str) -> tuple[float, float]:
    """Seconds, and peak memory in MiB, of ``what`` in a new process."""
    command = [sys.executable, str(Path(__file__)), "--alone", case, what]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds, peak = map(float, done.stdout.split())
    return seconds, peak


def main() -> int:
    """Run the benchmark; return its exit status, 1 if a ratio exceeds its limit."""
    parser = new_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=15, help="pairs of epochs per module")
    parser.add_argument("--alone", nargs=2, help="what one part of one module needs")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.alone:
        run_alone(*arguments.alone)
        return 0
    found = []
    for case in CASES:
        row = measured(case, arguments.pairs)
        row |= {f"{loop}_mib": alone(case, loop)[1] for loop in LOOPS}
        row["check_seconds"], row["check_mib"] = alone(case, "check")
        found.append(row)
    rows = [
        (
            row["model"],
            f"{row['parameters']:,}",
            f"{row['seconds']:.2f}",
            f"{row['ratio']:.3f}",
            f"{row['plain_mib']:.0f}",
            f"{row['growth_mib'] / row['plain_mib']:.3f}",
            f"{row['check_seconds']:.1f}",
            f"{row['check_mib'] / row['plain_mib']:.3f}",
        )
        for row in found
    ]
    heads = (
        "module",
        "parameters",
        "plain epoch, s",
        "time ratio",
        "plain peak, MiB",
        "peak ratio",
        "check, s",
        "check peak ratio",
    )
    parts = (
        "Growth with no seed alive over the plain loop of the same module, AdamW and data: the "
        "median over pairs of epochs, in processor time, and the peak memory of a process that "
        "runs one of the loops. Check is `esper.check`, beside the same plain loop.",
        table(heads, rows),
        f"{made_on()}.",
    )
    publish(
        "own_models",
        "Cost of growth without seeds on modules of one's own",
        parts,
        arguments.write,
        found,
    )
    kept = [
        row["ratio"] <= TIME_LIMIT
        and row["growth_mib"] <= MEMORY_LIMIT * row["plain_mib"]
        and row["check_mib"] <= CHECK_LIMIT * row["plain_mib"]
        and row["check_seconds"] <= CHECK_SECONDS
        for row in found
    ]
    return int(not all(kept))


if __name__ == "__main__":
    raise SystemExit(main())
