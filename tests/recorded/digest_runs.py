"""Digests of short runs in every mode: the proof that a refactoring changes no number.

    python tests/recorded/digest_runs.py --write       record digests.json
    python tests/recorded/digest_runs.py [MODE ...]    compare; exit status 1 where one differs

A digest covers the events without times and throughput, every tensor of the last checkpoint by
name, and every action of the run. The last bits of float arithmetic belong to a processor and a
version of torch: compare only on the machine that recorded.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from esper.simic.run.run_directory import processor_name

HERE = Path(__file__).resolve().parent
ROOT, RECORD = HERE.parents[1], HERE / "digests.json"

SMALL = (
    "--group-size 2 --rounds 2 --episode-length 24 --max-batches 2 --batch-size 16 "
    "--seed 7 --telemetry-level debug"
)
LEARNER = "--lstm-hidden 16"
SIX = f"{LEARNER} --envs 6 --threads 1"
GYM = "--envs 4 --rounds 2 --rollout-steps 32 --lstm-hidden 16 --threads 1 --seed 7"

MODES = {
    "native": f"ppo {SMALL} {SIX} --backend native",
    "native two threads": f"ppo {SMALL} {LEARNER} --envs 6 --threads 2 --backend native",
    "torch": f"ppo {SMALL} {SIX} --backend torch",
    "torch two threads": f"ppo {SMALL} {LEARNER} --envs 6 --threads 2 --backend torch",
    "amp bfloat16": f"ppo {SMALL} {SIX} --backend torch --use-amp --amp-dtype bfloat16",
    "amp float16": f"ppo {SMALL} {SIX} --backend torch --use-amp --amp-dtype float16",
    "amp policy": f"ppo {SMALL} {SIX} --backend native --amp-policy",
    "suite": f"ppo {SMALL} {LEARNER} --task suite --envs 14 --threads 1",
    "text": f"ppo {SMALL} {SIX} --task text_bytes",
    "own model": f"ppo {SMALL} {SIX} --plugin examples/own_model.py --task own_model",
    "two devices": f"ppo {SMALL} {SIX} --backend torch --devices cpu cpu",
    "strict shaped": f"ppo {SMALL} {SIX} --strict-gates --reward shaped --stage-shaping 0.1",
    "many at once": f"ppo {SMALL} {SIX} --no-one-at-a-time --reward terminal --lr-adaptive-kl 0.01",
    "schedules": f"ppo {SMALL} {SIX} --lr-warmup-frac 0.1 --lr-decay cosine --entropy-decay linear",
    "heuristic": f"heuristic {SMALL} --envs 6 --threads 1",
    "gymnasium": f"ppo {GYM} --gym CartPole-v1",
    "gymnasium without memory": f"ppo {GYM} --gym Acrobot-v1 --memory none --critic separate",
}
"""Arguments of ``esper train`` by mode."""


def main() -> int:
    """Record digests, or compare with those recorded."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("modes", nargs="*", help="modes to run; all when none is given")
    parser.add_argument("--write", action="store_true", help="record instead of comparing")
    options = parser.parse_args()
    known = {**{mode: run_digests for mode in MODES}, "resume": resume_digests}
    known |= {"float64 torch": float64_digests, "float64 native": float64_digests}
    wanted = options.modes or list(known)
    recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {"digests": {}}
    failures = 0
    for mode in wanted:
        found = known[mode](mode)
        if options.write:
            recorded["digests"][mode] = found
            print(f"recorded {mode}: {found}", flush=True)
        elif found == recorded["digests"][mode]:
            print(f"equal    {mode}", flush=True)
        else:
            failures += 1
            parts = [p for p, digest in found.items() if digest != recorded["digests"][mode].get(p)]
            print(f"DIFFERS  {mode}: {', '.join(parts)}", flush=True)
    machine = {"processor": processor_name(), "torch": str(torch.__version__)}
    if options.write:
        RECORD.write_text(json.dumps(recorded | machine, indent=2) + "\n")
    elif recorded | machine != recorded:
        print(f"recorded on {recorded['processor']} with torch {recorded['torch']}; not this one")
    return 1 if failures else 0


def run_digests(mode: str) -> dict[str, str]:
    """Digests of one run of ``esper train``."""
    with tempfile.TemporaryDirectory() as place:
        return directory_digests(train(MODES[mode], Path(place)))


def resume_digests(mode: str) -> dict[str, str]:
    """Digests of a run that was resumed after its first round: those of ``native``."""
    del mode
    with tempfile.TemporaryDirectory() as place:
        run = train(MODES["native"].replace("--rounds 2", "--rounds 1"), Path(place))
        train(f"ppo --resume {run} --rounds 2", Path(place))
        # A resumed run tells of two starts and two ends.
        digests = directory_digests(run)
        return {name: digests[name] for name in ("checkpoint", "actions")}


def train(arguments: str, place: Path) -> Path:
    """Run ``esper train`` and return its run directory."""
    command = [sys.executable, "-m", "esper.scripts.train", *arguments.split()]
    command += [] if "--resume" in arguments else ["--telemetry-dir", str(place)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nended with {done.returncode}: {done.stderr}")
    (run,) = (path for path in place.iterdir() if path.is_dir())
    return run


def directory_digests(run: Path) -> dict[str, str]:
    """Digests of what a run directory tells and keeps."""
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    timed = ("time", "environment_steps_per_second", "rollout_seconds", "update_seconds")
    events = [{k: v for k, v in line.items() if k not in timed} for line in lines]
    kept = [event for event in events if event.get("kind") != "throughput_drop"]
    decisions = [event["actions"] for event in events if "actions" in event]
    digests = {"events": digest(json.dumps(e, sort_keys=True).encode() for e in kept)}
    if decisions:
        digests["actions"] = digest([json.dumps(decisions).encode()])
    checkpoints = sorted((run / "checkpoints").glob("[0-9]*"))
    if checkpoints:
        files = sorted(checkpoints[-1].glob("*.pt"))
        parts = {file.stem: torch.load(file, weights_only=True) for file in files}
        digests["checkpoint"] = digest(tensor_bytes(parts))
    return digests


def float64_digests(mode: str) -> dict[str, str]:
    """Digests of an episode of random actions in float64, which no flag asks for."""
    from esper.runtime.tasks import find
    from esper.simic.growth.collect import collect
    from esper.simic.growth.environment import GrowthEnv
    from esper.simic.growth.step import GrowthConfig
    from esper.tamiyo.random_actor import RandomActor
    from esper.tolaria.precision import Precision

    torch.set_num_threads(1)
    config = GrowthConfig(
        seed=7, group_size=2, episode_length=24, max_batches=2, batch_size=16,
        dtype=torch.float64, backend=mode.split()[1],
    )  # fmt: skip
    cpu = torch.device("cpu")
    environment = GrowthEnv([find("digits_shift")], torch.arange(6), config, Precision("cpu"), cpu)
    rollout = collect(environment, RandomActor(config.seed), 0)
    return {"rollout": digest(tensor_bytes(rollout.state()))}


def tensor_bytes(tree: Any, name: str = "") -> Iterable[bytes]:
    """Names, dtypes, shapes and bytes of the tensors of nested dictionaries."""
    if isinstance(tree, dict):
        for key in sorted(tree):
            yield from tensor_bytes(tree[key], f"{name}/{key}")
    elif isinstance(tree, torch.Tensor):
        yield f"{name} {tree.dtype} {tuple(tree.shape)}".encode()
        yield (
            tree.detach().contiguous().view(torch.uint8).numpy().tobytes()
            if tree.ndim
            else (repr(tree.item()).encode())
        )
    else:
        yield f"{name} {tree!r}".encode()


def digest(chunks: Iterable[bytes]) -> str:
    """SHA-256 of some bytes, shortened."""
    sum_ = hashlib.sha256()
    for chunk in chunks:
        sum_.update(chunk)
    return sum_.hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
