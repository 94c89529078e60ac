"""The other commands of the user's documents that ask for a GPU, as they stand there.

Only ``uv run python`` is another interpreter.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from gpu_checks.paths import ROOT
from gpu_checks.place import Place, Row
from gpu_checks.section import Found, rows_table

SMOKE = (
    "-m esper.scripts.train ppo --episodes 1 --n-envs 2 --max-epochs 2 --max-batches 2 "
    "--slots mid --device {} --use-amp"
)
SCHEDULE = (
    "-m esper.scripts.train ppo --episodes 10 --n-envs 2 --max-epochs 2 --max-batches 2 "
    "--device {} --lr-warmup-frac 0.1 --lr-decay cosine"
)
SCRIPTS = (
    "scripts/benchmark_hot_path.py --device {} --envs 16 --episode-length 12 --episodes 1",
    "scripts/profile_hot_path_operations.py --device {} --episode-length 12",
    "scripts/profile_gpu_sync.py --device {}",
)
"""With the device; the benchmark's naive loop takes minutes for the default sizes."""
LINES = 40
"""Last lines of the output of a command that are kept."""


def measure(place: Place) -> Iterator[Row]:
    """Yield a row per command as soon as it has ended."""
    trainings = [words.format(place.size(str(place.device), "cpu")) for words in (SMOKE, SCHEDULE)]
    with tempfile.TemporaryDirectory() as folder:
        for words in trainings:
            yield done(words, folder)
    for script in place.size(SCRIPTS, ()):
        yield done(script.format(place.device), str(ROOT))


def done(words: str, folder: str) -> Row:
    """Run a command in a folder; return what became of it."""
    begin = time.monotonic()
    ended = subprocess.run(
        [sys.executable, *words.split()],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    row: Row = {
        "command": f"python {words}",
        "seconds": time.monotonic() - begin,
        "exit status": ended.returncode,
        "output": "\n".join(ended.stdout.splitlines()[-LINES:]),
    }
    return row | ({"error": row["output"]} if ended.returncode else {})


def page(rows: list[Row], found: Found) -> str:
    """Return the commands, then the end of what each printed."""
    outputs = [f"`{row['command']}`\n\n```\n{row['output']}\n```" for row in rows]
    names = ("command", "seconds", "exit status")
    return "\n\n".join([rows_table(names, rows), *outputs])
