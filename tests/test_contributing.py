"""What CONTRIBUTING.md says of files is true."""

import re
import shutil
from pathlib import Path

import torch

import esper
from processes import ESPER, ran

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


def test_an_observation_feature_is_added_in_one_file_and_its_native_twin(tmp_path: Path) -> None:
    """With torch the first of the two is enough: observation, moments and policy follow."""
    copy = tmp_path / "esper"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    features = copy / "tamiyo/policy/features.py"
    text = features.read_text()
    for old, new in (
        ('    "budget_left",\n', '    "budget_left",\n    "dormant_slots",\n'),
        (
            "            flags[:, 1:],\n",
            "            1.0 - living.float() / slots,\n            flags[:, 1:],\n",
        ),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    features.write_text(text)
    arguments = (
        "train ppo --backend torch --envs 2 --group-size 2 --rounds 1 --episode-length 3 "
        "--max-batches 1 --batch-size 8 --lstm-hidden 8 --threads 1"
    )
    done = ran([*ESPER, *arguments.split()], tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    (moments,) = (tmp_path / "runs").glob("*/checkpoints/000001/moments.pt")
    from esper.tamiyo.policy.features import HOST_FEATURES

    stored = torch.load(moments, weights_only=True)
    assert len(stored["host"]["mean"]) == len(HOST_FEATURES) + 1
