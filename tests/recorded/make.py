"""Records the run directories that stand beside this file. Run from the repository's root:

    python tests/recorded/make.py [NAME ...]

Every one comes from a real run; only what tells of the machine is blanked, and checkpoints but the
healthy run's last are left out. ``old_schema`` is recorded by the code of ``OLD_REVISION``.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
OLD_REVISION = "fe5308e5ee1e091f998f045682d5f71b0454ca92"
"""The last revision that wrote schema 2."""

TINY = {
    "envs": 6, "group_size": 2, "episode_length": 14, "max_batches": 2, "batch_size": 16,
    "lstm_hidden": 8, "threads": 1, "keep_checkpoints": 1, "seed": 11, "backend": "torch",
    "entropy": 0.3, "learning_rate": 0.02, "target_kl": 0.3,
}  # fmt: skip


GENTLE = {"entropy": 2.0, "learning_rate": 0.006, "minibatches": 2, "seed": 14}
"""Settings with which the policy moves and stays within its bounds."""


BROKEN_HEADS = """
import torch
from esper.simic.ppo import PPOAgent

learn = PPOAgent.update

def update(self, rollout):
    if self.updates == 4:
        for parameter in self.policy.head_parameters("tempo"):
            parameter.requires_grad_(False)
        for parameter in self.policy.head_parameters("style"):
            parameter.register_hook(lambda gradient: gradient * torch.nan)
    return learn(self, rollout)

PPOAgent.update = update
"""
"""From the fifth update on one head has no gradient and another's is NaN."""


def train(
    target: Path,
    source: Path = ROOT,
    until: str | None = None,
    before: str = "",
    **settings: object,
) -> None:
    """Train in a process of its own and move its run directory to ``target``.

    Args:
        target: replaced.
        source: checkout whose code runs.
        until: kill the process once its events hold this text.
        before: Python that runs before training.
        settings: besides those of ``TINY``.
    """
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        file = place / "settings.json"
        file.write_text(json.dumps(TINY | settings))
        code = f"{before}\nfrom esper.scripts.train import main\nmain()"
        command = [sys.executable, "-c", code, "ppo", "--config-json", str(file)]
        command += ["--telemetry-dir", str(place / "runs")]
        environment = os.environ | {"PYTHONPATH": str(source / "src"), "OMP_NUM_THREADS": "1"}
        with (place / "log").open("wb") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            if until is not None:
                _wait_for(until, place / "runs")
                process.send_signal(signal.SIGKILL)
            code = process.wait()
        if code != (0 if until is None else -signal.SIGKILL):
            sys.exit(f"the run ended with {code}:\n{(place / 'log').read_text()}")
        (run,) = (place / "runs").iterdir()
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(run, target)
    for name in ("report.html", "lock"):
        (target / name).unlink(missing_ok=True)
    _blank(target / "config.json")


def _wait_for(text: str, runs: Path) -> None:
    for _ in range(3_000):
        files = list(runs.glob("*/events.jsonl"))
        if files and text in files[0].read_text():
            return
        time.sleep(0.02)
    raise TimeoutError(text)


def _blank(config: Path) -> None:
    """Take out what tells of the machine."""
    content = json.loads(config.read_text())
    content["settings"]["telemetry_dir"] = "./runs"
    blanks = {"command": ["esper", "train", "ppo"], "platform": "Linux", "device_name": "a CPU"}
    content["fingerprint"].update(blanks)
    config.write_text(json.dumps(content, indent=2) + "\n")


def healthy(target: Path) -> None:
    """Three tasks at debug level; seeds are born, fossilised and pruned; with its checkpoint."""
    tasks = ["digits_shift", "digits", "digits_mlp"]
    train(target, task=tasks, rounds=6, telemetry_level="debug", reward="terminal", **GENTLE)


def anomalous(target: Path) -> None:
    """A learning rate that throws the policy out of every bound, and broken heads at the end."""
    wild = {"learning_rate": 0.3, "target_kl": 1e30, "max_gradient_norm": 1e30}
    train(target, before=BROKEN_HEADS, rounds=6, envs=4, **wild)
    shutil.rmtree(target / "checkpoints")


def interrupted(target: Path) -> None:
    """Killed in the third round; what it wrote last is cut off in the middle of a line."""
    train(target, until='"round":3,"step":6,', rounds=100, envs=4)
    shutil.rmtree(target / "checkpoints")
    events = target / "events.jsonl"
    *whole, last = events.read_bytes().splitlines(keepends=True)
    if last.endswith(b"\n"):
        last = last[: len(last) // 2]
    events.write_bytes(b"".join(whole) + last)


def old_schema(target: Path) -> None:
    """What schema 2 looked like."""
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "source.tar"
        make = ["git", "archive", "--output", str(archive), OLD_REVISION, "src", "benchmarks"]
        subprocess.run(make, cwd=ROOT, check=True)
        shutil.unpack_archive(archive, folder, filter="data")
        train(target, source=Path(folder), rounds=3, envs=4, telemetry_level="debug")
    shutil.rmtree(target / "checkpoints")


RECORDINGS: dict[str, Callable[[Path], None]] = {
    make.__name__: make for make in (healthy, anomalous, interrupted, old_schema)
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(RECORDINGS))
    for name in parser.parse_args().names or RECORDINGS:
        RECORDINGS[name](HERE / name)
        print(name)
