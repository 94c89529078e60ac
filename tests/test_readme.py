"""README.md: figures agree with the committed results that they quote, and it stays short."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from esper.leyline.config import TrainConfig, defaults_of, flatten
from esper.runtime.tasks import find
from esper.simic.training import vectorized
from small_runs import SMALL

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
README = (ROOT / "README.md").read_text()

FREE_OF_RESULTS = ("Python 3.11", "95 % intervals", "CIFAR-10")
"""Numbers in the prose that no result holds."""


def read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def table(name: str, first: str) -> dict[str, list[str]]:
    """Rows of the Markdown table of a result whose heading begins with ``first``, by first cell."""
    lines = (RESULTS / name).read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first} |"))
    rows = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        rows[cells[0]] = cells[1:]
    return rows


def backends() -> list[str]:
    native, torch = read("hot_path_digits.json")
    assert (native["backend"], torch["backend"]) == ("NativeBackend", "TorchBackend")
    return [f"on PyTorch, about {native['eps'] / torch['eps']:.0f} times slower"]


def steps(cell: str) -> float:
    return math.inf if cell == "never" else float(cell.replace(",", ""))


def gymnasium() -> list[str]:
    """What the defaults keep of ten seeds, and on which tasks sb3-contrib needs fewer steps."""
    rows = table("gym_defaults.md", "task")
    (control,) = [cells for name, cells in rows.items() if "memory=none" in name]
    assert control[2] == "0 of 10"
    rows = {name: cells for name, cells in rows.items() if "memory=none" not in name}
    counts = [[int(x) for x in cells[3].split(" of ")] for cells in rows.values()]
    stable = sum(10 * seeds >= 9 * count for seeds, count in counts)
    lines = (RESULTS / "gym_defaults.md").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| task | opponent |"))
    best: dict[str, float] = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        name, _, median, *_ = (cell.strip() for cell in line.strip("|").split("|"))
        best[name] = min(best.get(name, math.inf), steps(median))
    faster = {name for name, median in best.items() if steps(rows[name][1]) > median}
    assert faster == set()
    return [
        f"on {stable} of {len(rows)} tasks at least nine of ten seeds keep 95 % of their best "
        "evaluation to the end",
        f"CartPole takes {rows['CartPole-v1'][1]} steps (sb3-contrib: {best['CartPole-v1']:,.0f})",
        f"without velocities {rows['esper/MaskedCartPole-v0'][1]} "
        f"({best['esper/MaskedCartPole-v0']:,.0f})",
    ]


def recipes() -> list[str]:
    found = read("recipes.json")["digits_shift"]
    host, static = (found["tested"][network] for network in ("host", "static"))
    assert found["static_parameters"] == pytest.approx(3 * found["host_parameters"], rel=0.05)
    return [
        f"that never grows reaches {100 * host['shared_accuracy']:.1f} % accuracy on test instead "
        f"of {100 * host['former_accuracy']:.1f} %, and a static network of three times its "
        f"size {100 * static['shared_accuracy']:.1f} %"
    ]


def text() -> list[str]:
    page = (RESULTS / "text.md").read_text().split("## text_gpt")[1]
    rows = [[cell.strip() for cell in line.split("|")] for line in page.splitlines() if "|" in line]
    assert rows[0][3] == "gain"
    gains = [float(row[3].split()[0]) for row in rows[2:]]
    assert gains
    assert max(gains) <= 0
    return ["On `text_gpt` no seed that was tried beats never growing"]


def host() -> list[str]:
    return [
        f"The host of `digits_shift` has {find('digits_shift').host.parameter_count} parameters"
    ]


CLAIMS = {
    backends: "docs/command-line.md",
    gymnasium: "docs/gymnasium.md",
    text: "docs/tasks.md",
    recipes: "README.md",
    host: "README.md",
}
"""What pages claim by hand, and the page of each claim."""


def prose(page: str) -> str:
    """A page without code, headings, targets of links and texts from results, as one line."""
    plain = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    plain = re.sub(r"<!-- figures.*?<!-- end -->", "", plain, flags=re.DOTALL)
    return " ".join(re.sub(r"\]\([^)]*\)", "]", plain).split())


def block(page: str, after: str, language: str = "") -> list[str]:
    """Lines of the first block of code behind a text."""
    behind = (ROOT / page).read_text().split(after)[1]
    return re.search(rf"^```{language}\n(.*?)^```", behind, re.M | re.S)[1].splitlines()


def test_it_stays_short() -> None:
    assert len(README.split()) <= 700
    table = re.search(r"<!-- figures: results -->\n(.*?)<!-- end -->", README, re.DOTALL)[1]
    assert len(table.splitlines()) - 2 <= 8


def test_a_model_of_ones_own_comes_before_the_policy() -> None:
    assert README.index("esper.grow(") < README.index("esper train ppo --task")


@pytest.mark.parametrize("claim", CLAIMS)
def test_figures_agree_with_committed_results(claim: Callable[[], list[str]]) -> None:
    for sentence in claim():
        assert sentence in prose(CLAIMS[claim])


def test_every_figure_belongs_to_a_claim() -> None:
    remainder = prose("README.md")
    for sentence in (*(s for claim in CLAIMS for s in claim()), *FREE_OF_RESULTS):
        remainder = remainder.replace(sentence, "")
    assert re.findall(r"\S*\d\S*", remainder) == []


def test_printed_output_is_committed() -> None:
    committed = (RESULTS / "demo.md").read_text().splitlines()
    lines = block("README.md", "ends like this")
    assert lines
    assert [line for line in lines if line not in committed] == []


def test_the_example_runs(tmp_path: Path, monkeypatch, capsys) -> None:
    train = vectorized.train_ppo_vectorized

    def train_less(**settings: Any) -> vectorized.RunSummary:
        return train(**settings | SMALL | {"rounds": 1, "telemetry_dir": str(tmp_path)})

    monkeypatch.setattr(vectorized, "train_ppo_vectorized", train_less)
    lines = block("docs/command-line.md", "## From Python", "python")
    names: dict[str, Any] = {}
    exec("\n".join(lines), names)
    assert names["logits"].shape == (len(names["grown"].images), 10)
    assert str(names["run"].path) in capsys.readouterr().out
    assert len([line for line in lines if line]) <= 10


def test_flags_of_the_tour_exist() -> None:
    page = (ROOT / "docs" / "command-line.md").read_text()
    section = page.split("## Train")[1].split("## Watch")[0]
    settings = flatten(TrainConfig()) | flatten(defaults_of("gym")) | flatten(defaults_of("impala"))
    known = {name.replace("_", "-") for name in settings} | {"config-json", "resume"}
    flags = {flag.removeprefix("no-") for flag in re.findall(r"--([a-z][a-z-]+)", section)}
    assert flags - known == {"gym", "model", "records", "sanctum", "seeds", "trust"}
