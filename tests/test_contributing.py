"""What CONTRIBUTING.md says of files is true."""

import re
import shutil
from pathlib import Path

import pytest
import torch

import esper
from esper.leyline.actions import BLUEPRINTS
from esper.tamiyo.policy.features import HOST_FEATURES
from processes import ran_python
from small_runs import events_of

ROOT = Path(__file__).parents[1]
PACKAGE = Path(esper.__file__).parent
ROWS = [line for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines() if line[:2] == "| "]


def test_every_path_exists_and_holds_the_symbols_named_behind_it() -> None:
    named = 0
    for row in ROWS:
        file = ""
        for word in re.findall(r"`([\w./]+)`", row.partition("|")[2].partition("|")[2]):
            if "/" in word:
                file, path = word, PACKAGE / word
                assert path.exists() or (ROOT / word).exists(), word
                named += 1
            elif file.endswith(".py"):
                assert re.search(rf"(def|class) {word.split('.')[-1]}\b", path.read_text()), row
                named += 1
    assert named > 25


ADDITIONS = {
    "observation feature": (
        "tamiyo/policy/features.py",
        {
            '    "budget_left",\n': '    "budget_left",\n    "dormant_slots",\n',
            "            flags[:, 1:],\n": "            1.0 - living.float() / slots,\n"
            "            flags[:, 1:],\n",
        },
    ),
    "rule of the world": (
        "leyline/config/groups.py",
        {
            "    strict_gates: bool": "    toll: float = setting(0.0, NOT_NEGATIVE)\n"
            '    """Subtracted from the reward of every step."""\n'
            "    strict_gates: bool"
        },
    ),
    "its use": (
        "simic/growth/shard.py",
        {"return reward - ": "return reward - self.config.toll - "},
    ),
    "blueprint": (
        "kasmina/blueprints/__init__.py",
        {
            'register("norm", conv.norm)\n': 'register("norm", conv.norm)\n'
            'register("wide_norm", lambda channels: conv.norm(channels))\n'
        },
    ),
}
"""The rows of the table: a file of the package, and its text before and after an addition."""
IMITATION = "train imitation --records runs/run runs/free --threads 1"
COMMANDS = """
import sys; from esper.scripts.entry import run_guarded; from esper.scripts.main import esper
print([run_guarded(esper, line.split()) for line in sys.argv[1:]])
"""


def test_a_feature_a_rule_and_a_blueprint_are_added_as_their_rows_say(tmp_path: Path) -> None:
    """Settings, observation, moments, policy, records and reward follow by themselves."""
    copy = tmp_path / "esper"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for path, additions in ADDITIONS.values():
        text = (copy / path).read_text()
        for old, new in additions.items():
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        (copy / path).write_text(text)

    small = (
        "train ppo --backend torch --envs 2 --group-size 2 --rounds 1 --episode-length 3 "
        "--max-batches 1 --batch-size 8 --lstm-hidden 8 --threads 1 --record"
    )
    lines = f"{small} --toll 100 --name run", f"{small} --name free", IMITATION
    done = ran_python(COMMANDS, *lines, where=tmp_path, PYTHONPATH=str(tmp_path))
    # Records of different rules are not mixed, and the new one is one of them.
    assert done.stdout.endswith("[0, 0, 2]\n"), done.stderr
    assert "toll is 100.0 in runs/run and 0.0 in runs/free" in done.stderr
    checkpoint = tmp_path / "runs/run/checkpoints/000001"
    moments, policy = (torch.load(checkpoint / f"{name}.pt") for name in ("moments", "policy"))
    assert len(moments["host"]["mean"]) == len(HOST_FEATURES) + 1
    assert len(policy["choice_heads.blueprint.bias"]) == len(BLUEPRINTS) + 1
    returns, free = (
        outcome["episode_return"]
        for name in ("run", "free")
        for outcome in events_of(tmp_path / "runs" / name, "EPISODE_OUTCOME")
    )
    assert returns == pytest.approx([value - 300 for value in free], abs=10)
