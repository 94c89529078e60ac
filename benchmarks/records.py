"""What recording costs: its share of training's time, and bytes per environment step.

    python benchmarks/records.py --write      # a million steps of one case: about 15 minutes
    python benchmarks/records.py --steps 6000 --long-steps 10000

Each case is a run with --record. The share is the time of converting and writing the records, with
the disk's syncs, over the time of the rounds. Random actions change most between steps, so their
records are the largest. Reading is from the page cache into one tensor per column.
"""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from reporting import made_on, new_parser, publish, table

from esper.leyline.config import defaults_of, unflatten
from esper.leyline.records import record_files
from esper.simic.records.episodes import read_episodes
from esper.simic.records.record_writer import RecordWriter
from esper.simic.training.growth_trainee import GrowthTrainee
from esper.simic.training.vectorized import run_training

LONG = ("digits_mlp", "ppo", 256)
"""The case that trains for a million steps, of a host so small that recording costs most."""
LIMIT = 0.05
"""Largest share of training's time that recording may take."""
EPISODE = 40
"""Steps of an episode of these tasks."""
CASES = (
    ("digits_shift", "ppo", 32),
    LONG,
    ("suite", "ppo", 56),
    ("digits_shift", "heuristic", 32),
    ("digits_shift", "random", 32),
)
"""Task, policy and number of environments."""


@contextmanager
def timed(seconds: list[float]) -> Iterator[None]:
    """Within the context, append the time of every call that belongs to recording."""

    def watched(original: Any) -> Any:
        def call(*arguments: Any) -> Any:
            begin = time.perf_counter()
            try:
                return original(*arguments)
            finally:
                seconds.append(time.perf_counter() - begin)

        return call

    with (
        patch.object(GrowthTrainee, "record", watched(GrowthTrainee.record)),
        patch.object(RecordWriter, "write", watched(RecordWriter.write)),
    ):
        yield


def cost(task: str, policy: str, envs: int, steps: int) -> dict[str, Any]:
    """Train for at least ``steps`` environment steps; return what recording them cost."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "task": [task],
            "envs": envs,
            "rounds": -(-steps // (envs * EPISODE)),
            "threads": 1,
            "record": True,
            "telemetry_dir": folder,
        }
        seconds: list[float] = []
        with timed(seconds):
            run = run_training(unflatten(settings, defaults_of("growth")), policy)
        files = record_files(run.path)
        per_round = envs * EPISODE
        training = sum(per_round / one.steps_per_second for one in run.rounds)
        begin = time.perf_counter()
        taken = int(read_episodes([run.path]).lengths.sum())
        reading = time.perf_counter() - begin
        assert taken == per_round * len(files)
        return {
            "task": task,
            "policy": policy,
            "envs": envs,
            "steps": taken,
            "speed": taken / training,
            "share": sum(seconds) / training,
            "milliseconds": 1000 * sum(seconds) / len(files),
            "bytes": sum(path.stat().st_size for path in files) / taken,
            "read": taken / reading,
        }


def main() -> int:
    """Run the benchmark; return its exit status, 1 if a share exceeds the limit."""
    parser = new_parser(__doc__)
    parser.add_argument("--steps", type=int, default=20_000, help="environment steps per case")
    parser.add_argument("--long-steps", type=int, default=1_000_000, help="of the longest case")
    arguments = parser.parse_args()
    found = []
    for case in CASES:
        found.append(cost(*case, arguments.long_steps if case == LONG else arguments.steps))
        print(found[-1], flush=True)
    heads = (
        "task",
        "policy",
        "environments",
        "steps",
        "steps/s",
        "recording, ms a round",
        "share of training, %",
        "bytes a step",
        "read, steps/s",
    )
    rows = [
        (
            f"`{row['task']}`",
            row["policy"],
            row["envs"],
            f"{row['steps']:,}",
            f"{row['speed']:.0f}",
            f"{row['milliseconds']:.1f}",
            f"{100 * row['share']:.2f}",
            f"{row['bytes']:.0f}",
            f"{row['read']:,.0f}",
        )
        for row in found
    ]
    parts = (
        "Recording is converting the rollout of a round to columns, compressing them, and writing "
        "and syncing the file; its share is that of the rounds' time, updates included.",
        table(heads, rows),
        f"{made_on()}.",
    )
    publish("records", "Cost of records", parts, arguments.write, found)
    return int(any(row["share"] > LIMIT for row in found))


if __name__ == "__main__":
    raise SystemExit(main())
