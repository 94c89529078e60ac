"""Put a trained controller into the box of policies: the smallest run directory that acts.

    python benchmarks/ship_policy.py RUN NAME

Writes ``src/esper/policies/NAME``: the settings of the policy, and its best checkpoint without the
optimizer's state and without the paths of this machine. The card is written by hand.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch

from esper.scripts.entry import run_guarded
from esper.simic.run.checkpoint import load_latest, save
from esper.simic.run.identity import Identity
from esper.simic.tools.grow import GrowingPolicy
from esper.simic.training.setup import build_agent
from esper.tamiyo.policy.features import FeatureNames
from esper.tamiyo.policy_box import BOX, RUN

KEPT = ("policy", "moments", "counters")
"""Parts of the checkpoint that act, or that say how long the policy learned."""
OF_THE_MACHINE = {"telemetry_dir": "./runs", "data_dir": "./data", "name": None, "threads": 1}


def ship(run: Path, name: str) -> Path:
    """Write the policy of ``run`` as ``name``; return its folder.

    Raises:
        UsageError: the run has no usable checkpoint.
    """
    trained = GrowingPolicy.named(str(run))
    assert trained.checkpoint is not None
    folder = BOX / name
    folder.mkdir(exist_ok=True)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    stored = json.loads((run / RUN).read_text())
    settings = {**stored["settings"], **OF_THE_MACHINE}
    content = {
        "id": stored["id"],
        "settings": settings,
        "fingerprint": {**stored["fingerprint"], "command": []},
    }
    if trained.recorded is not None:
        content["offline"] = {"episodes": trained.recorded}
    (folder / RUN).write_text(json.dumps(content, indent=2) + "\n")
    features = trained.checkpoint.features or FeatureNames.current()
    fresh = build_agent(trained.settings, torch.device("cpu"), features=features).state()
    parts = {**fresh, **{part: trained.checkpoint.parts[part] for part in KEPT}}
    save(folder, trained.checkpoint.round, parts, 0, 1, Identity(run=stored["id"]), features)
    load_latest(folder)
    return folder


def main() -> int:
    """Ship the policy; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", help="run directory")
    parser.add_argument("name", help="name in the box")
    given = parser.parse_args()
    return run_guarded(_shipped, [given.run, given.name])


def _shipped(arguments: list[str]) -> int:
    run, name = arguments
    print(f"wrote {ship(Path(run), name)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
