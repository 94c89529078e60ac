"""Figures and pictures in the pages: as committed, as defined, and on which side they stand."""

import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import esper.karn
from esper.leyline.errors import UsageError
from esper.runtime.tasks import find
from esper.simic.training.vectorized import train_ppo_vectorized
from esper_lab import shipped_controls
from esper_lab.hosts import SPLITS
from esper_lab.shipped_controls import ShippedControls
from small_runs import SMALL

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "write_figures.py"))
TEXTS, RACES, written = SCRIPT["TEXTS"], SCRIPT["RACES"], SCRIPT["written"]
DRAWING = runpy.run_path(str(ROOT / "scripts" / "draw_growth.py"))


@pytest.mark.parametrize("page", SCRIPT["PAGES"])
def test_figures_in_the_pages_equal_the_committed_ones(page: str) -> None:
    text = (ROOT / page).read_text()
    assert "<!-- figures: " in text
    assert written(text, folder="../" * page.count("/")) == text, "run scripts/write_figures.py"


def policy(way: float, rule: list[float]) -> dict[str, Any]:
    return {
        "gain": [way, way - 1, way + 1],
        "validation_gain": [way + 2, way, way + 4],
        "rule": "forest",
        "above_rule": rule,
        "above_misled": [0.2, -0.5, 0.9],
        "above_yoked": [0.1, -0.6, 0.8],
        "network": "static network of three times the size",
        "above_network": [rule[0] - 5.0, rule[1] - 5.0, rule[2] - 5.0],
    }


def family(
    looking: list[float], training: list[float] | None = None, **rest: Any
) -> dict[str, Any]:
    """The result of a family: the clairvoyant above rules that look, and above full tuning."""
    network = None if training is None else "full tuning"
    room = {"over_looking": looking, "over_training": training, "best_training": network}
    return {"hosts": 200, "headroom": room, "passes": training is not None, "lacking": []} | rest


def test_the_text_on_the_world_names_families_and_opponents(tmp_path: Path) -> None:
    assert "not measured yet" in TEXTS["world"](tmp_path)
    families = {
        "one": family([3.0, 2.0, 4.0], [-5.0, -7.0, -3.0]),
        "two": family([0.5, 0.1, 0.9], hosts=80, lacking=["a", "b"]),
    }
    put(tmp_path, "world", families)
    text = TEXTS["world"](tmp_path)
    for words in (
        "could pay:** `one` of 2 families passes",
        "of `one` a clairvoyant is above the best rule that looks, by +3.0 [+2.0",
        "below the best network that does not grow (*full tuning*), by -5.0 [-7.0, -3.0].",
        "of `two` a clairvoyant is above the best rule that looks, by +0.5 [+0.1, +0.9]",
        "+0.9] points of test utility.",
    ):
        assert words in text
    assert text.count("does not grow") == 1


def test_the_page_on_evaluation_says_what_the_gate_says_of_each_family(tmp_path: Path) -> None:
    assert "not measured yet" in TEXTS["gate"](tmp_path)

    def controls(**gains: float) -> dict[str, Any]:
        return {
            name.replace("_", " ").replace(" tuned", ", tuned"): {
                "utility": [50.0 + gain, 0.0, 0.0],
                "gain": [gain, gain - 1, gain + 1],
            }
            for name, gain in gains.items()
        }

    frozen = controls(
        never_grow=0.0, full_tuning_of_a_copy=20.0, clairvoyant_per_host=30.0, forest=10.0
    )
    scratch = controls(
        never_grow=0.0, never_grow_tuned=5.0, forest=-2.0, tree=-1.0, clairvoyant_per_host=30.0
    )
    families = {
        "one": family([3.0, 2.0, 4.0], [-5.0, -7.0, -3.0], controls=frozen),
        "two": family([0.5, -0.1, 0.9], controls=scratch),
    }
    put(tmp_path, "world", families)
    text = TEXTS["gate"](tmp_path)
    assert "(benchmarks/results/world.md) has 200 hosts of each" in text
    first, second = text.split("`two` does not pass the gate")
    for words in (
        "`one` passes the gate",
        "is above the best rule that looks, by +3.0 [+2.0, +4.0] points, and below *full ",
        "tuning*, the best network that does not grow, by -5.0 [-7.0, -3.0].",
        "gain is +30.0 [+29.0, +31.0], that of *full tuning of a copy*",
    ):
        assert words in first
    assert "initial weights" not in first
    assert "is neither above nor below the best rule that looks, by +0.5 [-0.1, +0.9]" in second
    # Never growing is no rule that grows, though it is better here.
    assert "rule that grows (*tree*) gains -1.0 [-2.0, +0.0] points" in second
    assert "a tuned learning rate +5.0 [+4.0, +6.0]." in second


def test_output_is_copied_as_it_is(tmp_path: Path) -> None:
    block = (
        "```\nadaptation\n│ never grow │ 1.0 │\nA line of many words " + 20 * "and more " + "\n```"
    )
    page = "# A\n\n<!-- figures: example -->\nold\n<!-- end -->\nrest\n"
    assert "not kept yet" in written(page, tmp_path)
    (tmp_path / "example_ladder.md").write_text(f"# Output\n\n`command`:\n\n{block}\n\nhere.\n")
    expected = page.replace("old", block)
    assert written(page, tmp_path) == expected
    assert written(expected, tmp_path) == expected


def test_the_shipped_controls_are_named_with_their_sizes(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(shipped_controls, "FOLDER", tmp_path)
    for name in ("one", "two", "three"):
        shipped_controls.write_shipped(name, ShippedControls("id", "here", 20, 7, []))
    text = TEXTS["shipped"](tmp_path)
    assert "of `one`, `three` and `two` ship with Esper, played on 7 hosts" in text
    assert text.endswith("with rules tuned on 20.")
    shipped_controls.write_shipped("two", ShippedControls("id", "here", 20, 8, []))
    with pytest.raises(ValueError, match="several sizes"):
        TEXTS["shipped"](tmp_path)


def test_the_splits_that_pages_name_are_those_of_the_command() -> None:
    first, last = SPLITS[0], SPLITS[-1]
    assert [*range(first, last + 1)] == [*SPLITS]
    for page, words in (
        ("docs/evaluation.md", f"with the seeds {first} to {last} in turn"),
        ("docs/tasks.md", f"`esper evaluate` [the seeds {first} to {last} in turn]"),
    ):
        assert words in " ".join((ROOT / page).read_text().split())


def put(folder: Path, name: str, figures: object) -> None:
    (folder / f"{name}.json").write_text(json.dumps(figures))


def test_a_policy_stands_where_its_intervals_put_it(tmp_path: Path) -> None:
    forest = {"forest": {"gain": [13.0, 12.0, 14.0]}}
    fresh = {"suite": (15.0, [2.0, 0.5, 3.5]), "held_out": (9.0, [-4.0, -5.0, -3.0])}
    figures = {
        "policies": 8,
        "episodes": 896,
        "fresh": {
            name: {"hosts": 80, "controls": forest, "policies": {"sampled": policy(*given)}}
            for name, given in fresh.items()
        },
    }
    put(tmp_path, "suite", figures)
    text = TEXTS["policy"](tmp_path)
    for words in (
        "8 policies were each trained on the training suite for 896 episodes.",
        "80 fresh hosts of the training suite they gain +15.0 [+14.0, +16.0] points",
        "(+17.0 on validation)",
        "*forest*, gains +13.0 [+12.0, +14.0]",
        "**above** that rule, by +2.0 [+0.5, +3.5]",
        "of the held-out suite they gain +9.0",
        "**below** that rule, by -4.0 [-5.0, -3.0]",
        "**below** the best network that does not grow (*static network of three",
        "times the size*), by -3.0 [-4.5, -1.5].",
    ):
        assert words in text
    assert text.count("neither above nor below its misled twin, by +0.2 [-0.5, +0.9]") == 2
    rows = TEXTS["results"](tmp_path).splitlines()[2:]
    assert [row.split(" | ")[1:] for row in rows] == [
        ["best rule (*forest*)", "**-4.0 [-5.0, -3.0]** |"],
        ["best network that never grows", "**-9.0 [-10.0, -8.0]** |"],
    ]


def test_policies_that_look_stand_where_their_intervals_put_them(tmp_path: Path) -> None:
    one = policy(20.0, [2.0, 0.5, 3.5]) | {"by_controller": [1.0] * 8, "rule": "one look"}
    one["above_yoked"] = [3.0, 2.0, 4.0]
    rules = {"one look": [18.0, 17.0, 19.0], "try in turn": [19.0, 18.0, 20.0]}
    above = {"one look": [2.0, 1.0, 3.0], "try in turn": [-1.0, -2.0, -0.5]}
    other = {"hosts": 64, "rules": rules, "above": above}
    figures = {
        "hosts": 200,
        "policies": {"greedy": one},
        "share_of_gap": {"greedy": 0.431},
        "comparisons": {"one_seed": other | {"share_of_gap": 0.4}, "later_wider": other},
    }
    assert "not measured yet" in TEXTS["looking"](tmp_path)
    put(tmp_path, "policy", figures)
    text = TEXTS["looking"](tmp_path)
    assert text.startswith("- **A policy that looks.** 8 policies learned")
    assert "**above** the best rule (*one look*), by +2.0 [+0.5, +3.5], which is 43% of" in text
    assert "On 64 further hosts of `one_seed` they are below the best rule there (*try in" in text
    assert "by -1.0 [-2.0, -0.5], 40% of the way. On 64 new hosts of `later_wider`" in text
    put(tmp_path, "policy_adaptation", figures)
    put(tmp_path, "policy_suite", {"all draws": {"above_rule": [0.5, -0.1, 1.1]}})
    first, second, both = TEXTS["looking"](tmp_path).splitlines()
    assert first == text
    assert "learned from recorded branches of `adaptation`" in second
    assert "on all draws +0.5 [-0.1, +1.1], **neither above nor below**" in both
    lines = TEXTS["results"](tmp_path).splitlines()
    assert lines[2:] == [
        f"| [8 policies from records, `one_seed`](benchmarks/results/policy.md) | {row} |"
        for row in (
            "best rule (*one look*) | **+2.0 [+0.5, +3.5]**",
            "best network that never grows | **-3.0 [-4.5, -1.5]**",
        )
    ]
    put(tmp_path, "spanning_slots", {"seeds": 8, "ppo_minus_default": {"wide": [9.0, -1.0, 19.0]}})
    first = TEXTS["results"](tmp_path).splitlines()[2]
    assert first == (
        "| [PPO, layers become wider, 8 seeds](benchmarks/results/spanning_slots.md) | "
        "seeds behind layers | +9.0 [-1.0, +19.0] |"
    )


def test_growing_pays_where_it_is_above_the_best_network_without(tmp_path: Path) -> None:
    given = {
        "digits": ([0.1, -0.5, 0.7], [-3.0, -4.0, -2.0]),
        "digits_deep": ([5.0, 4.0, 6.0], [0.1, -0.1, 0.3]),
        "digits_shift": ([20.0, 18.0, 22.0], [4.0, 3.0, 5.0]),
    }
    figures = {
        name: {"controls": {"best fixed schedule": {"gain": gain}}, "above_network": above}
        for name, (gain, above) in given.items()
    }
    put(tmp_path, "tasks", figures)
    text = TEXTS["growing"](tmp_path)
    assert "on 2 of 3 tasks the best fixed schedule" in text
    assert "largest on `digits_shift`, +20.0 [+18.0, +22.0] points" in text
    assert "smallest on `digits`, +0.1 [-0.5, +0.7]. Against" in text
    assert "growing **pays on 1** (`digits_shift`) ([results]" in text
    del figures["digits_shift"]
    put(tmp_path, "tasks", figures)
    assert "growing **pays on 0** ([results]" in TEXTS["growing"](tmp_path)


def test_speed_is_quoted_against_the_fastest_way(tmp_path: Path) -> None:
    """Of every race, those that are lost too."""
    *names, last = RACES
    for number, name in enumerate(names):
        put(tmp_path, f"hot_path_{name}", race_rows(18.25 - number))
    assert "is not measured yet (`make bench-hot-path`)" in TEXTS["speed"](tmp_path)
    put(tmp_path, f"hot_path_{last}", race_rows(0.84, "abcd"))
    text = TEXTS["speed"](tmp_path)
    assert "On 2 cores training runs 18.2 (digits), 17.2 (fully connected), 16.2 (text)" in text
    assert "14.2 (32-64 channels) and 0.8 (128-256 channels) times as fast as over" in text
    assert "in the fastest of 3 to 4 ways ([races]" in text


def race_rows(ratio: float, naive: str = "abc") -> list[dict[str, Any]]:
    """A race of two backends, of which torch never wins, with a naive way for each letter."""
    ways: dict[str, Any] = {name: {} for name in naive}
    return [
        {"backend": name, "threads": 2, "ratio": own, "ways": ways}
        for name, own in (("TorchBackend", 0.5), ("NativeBackend", ratio))
    ]


def test_what_is_not_there_is_not_measured(tmp_path: Path) -> None:
    for name in ("policy", "growing", "speed", "results"):
        assert "not measured yet" in TEXTS[name](tmp_path)


def test_utility_has_the_rent_and_the_diamonds_are_a_gain_apart(tmp_path: Path) -> None:
    more = {"rounds": 1, "seed": 4, "episode_length": 30, "telemetry_level": "normal"}
    settings = SMALL | more | {"task": "digits_shift", "telemetry_dir": str(tmp_path)}
    run = train_ppo_vectorized(**settings).path
    growth = DRAWING["read_growth"](run)
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
    DRAWING["write_svg"](growth, tmp_path / "growth.svg")
    assert growth.title in (tmp_path / "growth.svg").read_text()


def test_a_run_without_test_scores_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^run: .* has no test scores; train it again$"):
        DRAWING["read_growth"](ROOT / "tests" / "recorded" / "healthy")
