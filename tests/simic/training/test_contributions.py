"""Contributions of seeds at level normal, beside the signals of every step at level debug."""

import json
import math
from pathlib import Path

from esper.leyline.config import unflatten
from esper.simic.training.vectorized import run_training
from small_runs import SMALL


def test_every_fourth_step_has_what_the_acting_seeds_contribute(tmp_path: Path) -> None:
    more = {"envs": 6, "episode_length": 14, "rounds": 1, "telemetry_level": "debug"}
    config = unflatten(SMALL | more | {"telemetry_dir": str(tmp_path)})
    run = run_training(config, "rule").path
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    signals = {x["step"]: x for x in lines if x["event_type"] == "SEED_SIGNALS_MEASURED"}
    contributions = {x["step"]: x for x in lines if x["event_type"] == "SEED_CONTRIBUTIONS"}
    wanted = {}
    for at in range(4, 15, 4):
        rows = enumerate(signals[at]["contribution"])
        acting = [(i, k, v) for i, row in rows for k, v in enumerate(row) if v != "NaN"]
        if acting:
            wanted[at] = acting
    assert set(contributions) == set(wanted)
    assert wanted
    for at, event in contributions.items():
        found = list(zip(event["environment"], event["slot"], event["contribution"], strict=True))
        assert [own[:2] for own in found] == [own[:2] for own in wanted[at]]
        for (*_, rounded), (*_, exact) in zip(found, wanted[at], strict=True):
            assert math.isclose(rounded, exact, abs_tol=0.5001e-4)
