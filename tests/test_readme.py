"""README.md: every figure agrees with the committed result that it quotes, and the example runs."""

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

FREE_OF_RESULTS = ("Python 3.11", "8x8 pixels", "sb3-contrib", "95 % intervals")
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
    return [f"they run on PyTorch, about {native['eps'] / torch['eps']:.0f} times slower"]


def gymnasium() -> list[str]:
    rows = table("gym_proofs.md", "task")

    def steps(cell: str) -> float:
        found = re.match(r"\*\*([\d,]+|never)\*\*", cell)[1]
        return math.inf if found == "never" else float(found.replace(",", ""))

    for name in ("cartpole", "masked", "chain8", "chain32"):
        ours, theirs, budget = rows[name][2], rows[name][5], rows[name][1]
        assert steps(ours) <= steps(theirs), name
        assert steps(ours) <= float(budget.replace(",", "")), name
    return ["of length 8 and 32. The median number of steps is never above that of RecurrentPPO"]


def recipes() -> list[str]:
    found = read("recipes.json")["digits_shift"]
    host, static = (found["tested"][network] for network in ("host", "static"))
    assert found["static_parameters"] == pytest.approx(3 * found["host_parameters"], rel=0.05)
    return [
        f"its host that never grows reaches {100 * host['shared_accuracy']:.1f} % accuracy on test "
        f"instead of {100 * host['former_accuracy']:.1f} %, and a static network of three times "
        f"its size {100 * static['shared_accuracy']:.1f} %",
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


CLAIMS = (backends, gymnasium, recipes, text, host)


def prose() -> str:
    """The README without code, headings, targets of links and texts from results, as one line."""
    plain = re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL)
    plain = re.sub(r"<!-- figures.*?<!-- end -->", "", plain, flags=re.DOTALL)
    plain = re.sub(r"\]\([^)]*\)", "]", plain)
    return " ".join(plain.split())


def block(after: str, language: str = "") -> list[str]:
    """Lines of the first block of code behind a text."""
    found = re.search(rf"^```{language}\n(.*?)^```", README.split(after)[1], re.M | re.S)
    return found[1].splitlines()


@pytest.mark.parametrize("claim", CLAIMS)
def test_figures_agree_with_committed_results(claim: Callable[[], list[str]]) -> None:
    # The link to the result stands within the sentence here and there.
    text = prose().replace(" ([results])", "").replace("([results])", "")
    for sentence in claim():
        assert sentence in text


def test_every_figure_belongs_to_a_claim() -> None:
    left = prose().replace(" ([results])", "").replace("([results])", "")
    for sentence in (*(s for claim in CLAIMS for s in claim()), *FREE_OF_RESULTS):
        left = left.replace(sentence, "")
    assert re.findall(r"\S*\d\S*", left) == []


@pytest.mark.parametrize("command", ["`make demo` trains", "`make test` runs"])
def test_printed_output_is_committed(command: str) -> None:
    committed = (RESULTS / "demo.md").read_text().splitlines()
    shown = [line for line in block(command) if line != "..."]
    assert shown
    assert [line for line in shown if line not in committed] == []


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    train = vectorized.train_ppo_vectorized

    def train_less(**settings: Any) -> vectorized.RunSummary:
        return train(**settings | SMALL | {"rounds": 1, "telemetry_dir": str(tmp_path)})

    monkeypatch.setattr(vectorized, "train_ppo_vectorized", train_less)
    lines = block("## From Python", "python")
    names: dict[str, Any] = {}
    exec("\n".join(lines), names)
    assert names["logits"].shape == (len(names["grown"].images), 10)
    assert str(names["run"].path) in capsys.readouterr().out
    assert len([line for line in lines if line]) <= 10


@pytest.mark.parametrize("page", ["README.md", "docs/command-line.md"])
def test_links_lead_somewhere(page: str) -> None:
    folder = (ROOT / page).parent
    links = re.findall(r"\]\(([^)#]+)", (ROOT / page).read_text())
    assert links
    assert [link for link in links if not (folder / link).exists()] == []


def test_flags_and_targets_of_the_tour_exist() -> None:
    page = (ROOT / "docs" / "command-line.md").read_text()
    section = page.split("## Train")[1].split("## Watch")[0]
    settings = flatten(TrainConfig()) | flatten(defaults_of("gym")) | flatten(defaults_of("impala"))
    known = {name.replace("_", "-") for name in settings} | {"config-json", "resume"}
    flags = {flag.removeprefix("no-") for flag in re.findall(r"--([a-z][a-z-]+)", section)}
    assert flags - known == {"gym", "records", "sanctum", "seeds"}
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^\| `make ([a-z-]+)`", page, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
