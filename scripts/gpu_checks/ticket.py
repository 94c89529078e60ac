"""The literal command of ticket B11-PT-01, on a terminal of its own, until two updates are shown.

The CIFAR-10 files have the published format and random pixels. Only ``uv run python`` is another
interpreter, and with one device ``cuda:0`` stands twice. The command asks for 2000 rounds: after
the second update and the look at the screen it is stopped as a user stops it, by Ctrl-C.
"""

import json
import math
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from esper.karn.store import read_events
from esper.leyline.actions import HEADS
from esper.leyline.events import PPOUpdateCompleted
from esper.leyline.metrics import Metric, part_metric
from gpu_checks.place import Place, Row
from gpu_checks.section import Found, rows_table

COMMAND = (
    "-m esper.scripts.train ppo --devices {} {} --telemetry-dir ./telemetry --sanctum "
    "--telemetry-level debug --config-json config.json --gpu-preload --rounds 2000 --envs {} "
    "--experimental-gpu-preload-gather --task cifar_impaired"
)
CONFIG: dict[str, Any] = {
    "n_envs": 4, "n_episodes": 100, "max_epochs": 20, "lr": 3e-4, "entropy_coef": 0.05,
    "seed": 42, "slots": ["r0c1", "r1c2"], "amp": True, "amp_dtype": "auto",
}  # fmt: skip
"""Fields of the ticket's author; the command line overrides the first two."""
HEADS_AND_VALUE = (*HEADS, "value")
UPDATES = 2
SECONDS = 150.0
SIZE = (160, 50)


def measure(place: Place) -> Iterator[Row]:
    """Yield a row per number of environments and head, and one for the end of the command."""
    count = torch.cuda.device_count() if place.machine is None else 0
    devices = ("cpu", "cpu") if not count else ("cuda:0", "cuda:1" if count > 1 else "cuda:0")
    for envs in place.size((2, 64), (2,)):
        with tempfile.TemporaryDirectory() as folder:
            yield from shown(place, Path(folder), COMMAND.format(*devices, envs))


def shown(place: Place, folder: Path, command: str) -> Iterator[Row]:
    """Run the command in a folder; yield what became of it."""
    write_binary = import_module("cifar_files").write_binary
    terminal = import_module("scripts.pseudo_terminal").OnTerminal
    write_binary(folder / "data", place.size(1000, 8))
    sizes = place.size({}, {"max_epochs": 5, "max_batches": 2, "batch_size": 8})
    (folder / "config.json").write_text(json.dumps(CONFIG | sizes))
    words = [sys.executable, *command.split()]
    # A terminal of the tests finds Esper alone; the wheels stand in this process's variable.
    own = {**os.environ, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
    change = f"import os; os.chdir({str(folder)!r}); os.execve({words[0]!r}, {words!r}, {own!r})"
    begin = time.monotonic()
    one = terminal(command=[sys.executable, "-c", change], size=SIZE)
    try:
        updates = updates_of(one, folder, begin)
        seconds = time.monotonic() - begin
        look(one, begin)
        figures = on_screen(one.text())
        one.type("q")
        one.signal(signal.SIGINT)
        status = one.exit_status()
    except TimeoutError as error:
        yield {"command": command, "error": f"{error}"}
        return
    finally:
        one.close()
    yield {"command": command, "seconds": seconds, "updates": len(updates), "exit status": status}
    for head in HEADS_AND_VALUE:
        norms = [update.metrics[part_metric(Metric.HEAD_GRAD_NORMS, head)] for update in updates]
        row: Row = {"head": head, "gradient norms": norms, "on the screen": figures.get(head)}
        bad = [x for x in norms if not isinstance(x, int | float) or not math.isfinite(x)]
        if bad or not re.fullmatch(r"[\d.e+-]+", figures.get(head, "")):
            row["error"] = f"{head}: {norms} and on the screen {figures.get(head)}"
        yield row


def updates_of(one: Any, folder: Path, begin: float) -> list[PPOUpdateCompleted]:
    """Wait for the updates of the command.

    Raises:
        TimeoutError: there are too few within ``SECONDS``, or the command has ended.
    """
    while time.monotonic() < begin + SECONDS:
        for _ in range(10):
            if not one.read():
                raise TimeoutError(f"the command has ended:\n{one.text()[-3000:]}")
        runs = [path.parent for path in (folder / "telemetry").glob("*/events.jsonl")]
        found = [update for run in runs for update in read_events(run, PPOUpdateCompleted)]
        if len(found) >= UPDATES:
            return found
        if os.waitpid(one.pid, os.WNOHANG)[0]:
            raise TimeoutError(f"the command has ended:\n{one.text()[-3000:]}")
    raise TimeoutError(f"no {UPDATES} updates in {SECONDS:.0f} s:\n{one.text()[-3000:]}")


def look(one: Any, begin: float) -> None:
    """Open the policy page; keys that are pressed before Sanctum reads them are lost.

    Raises:
        TimeoutError: it does not appear within ``SECONDS``.
    """
    while b"gradient norm" not in one.output:
        if time.monotonic() > begin + SECONDS:
            raise TimeoutError(f"no policy page in {SECONDS:.0f} s:\n{one.text()[-3000:]}")
        one.type("2")
        for _ in range(20):
            one.read()
    for _ in range(40):
        one.read()


def on_screen(text: str) -> dict[str, str]:
    """Return the gradient norm by head as the policy page was first drawn."""
    lines = text.splitlines()
    heading = next(i for i, line in enumerate(lines) if "gradient norm  " in line)
    end = lines[heading].index("gradient norm") + len("gradient norm")
    rows = [line for line in lines[heading + 1 :][: len(HEADS_AND_VALUE)] if line.strip()]
    return {row.split()[0]: row[end - len("gradient norm") : end].strip() for row in rows}


def page(rows: list[Row], found: Found) -> str:
    """Return the commands, their ends, and the heads."""
    lines = []
    for row in rows:
        if "command" in row:
            lines.append(f"`python {row['command']}`")
        if "exit status" in row:
            lines.append(
                f"{row['updates']} updates after {row['seconds']:.0f} s; stopped by Ctrl-C with "
                f"exit status {row['exit status']}."
            )
    heads = [row | {"gradient norm": row["gradient norms"][-1]} for row in rows if "head" in row]
    return "\n\n".join([*lines, rows_table(("head", "gradient norm", "on the screen"), heads)])
