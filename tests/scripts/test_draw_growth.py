"""The picture of growth shows the gain as it is defined: test utility above the twin's."""

import re
import runpy
from pathlib import Path

import numpy as np
import pytest

import esper.karn
from esper.leyline.errors import UsageError
from esper.runtime.tasks import find
from esper.simic.training.vectorized import train_ppo_vectorized
from small_runs import SMALL

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "draw_growth.py"))


def test_utility_has_the_rent_and_the_diamonds_are_a_gain_apart(tmp_path: Path) -> None:
    more = {"rounds": 1, "seed": 4, "episode_length": 30, "telemetry_level": "normal"}
    settings = SMALL | more | {"task": "digits_shift", "telemetry_dir": str(tmp_path)}
    run = train_ppo_vectorized(**settings).path
    growth = SCRIPT["read_growth"](run)
    environment = re.search(r"environment (\d+)", growth.title)[1]
    where = f"WHERE environment = {environment}"
    (gain,) = esper.karn.query(run, f"SELECT gain FROM episodes {where}").to_pydict()["gain"]
    assert growth.test[0] - growth.test[1] == pytest.approx(gain)
    assert f"{gain:+.1f} points of test utility" in growth.title
    steps = esper.karn.query(
        run, f"SELECT expected_accuracy, added_parameters FROM steps {where} ORDER BY step"
    ).to_pydict()
    host = find("digits_shift").host.parameter_count
    assert max(steps["added_parameters"]) > 0
    price = 0.05 * np.log(1 + np.array(steps["added_parameters"]) / host)
    np.testing.assert_allclose(
        growth.grown, 100 * (np.array(steps["expected_accuracy"]) - price), rtol=1e-5
    )
    SCRIPT["write_svg"](growth, tmp_path / "growth.svg")
    assert growth.title in (tmp_path / "growth.svg").read_text()


def test_a_run_without_test_scores_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^run: .* has no test scores; train it again$"):
        SCRIPT["read_growth"](ROOT / "tests" / "recorded" / "healthy")
