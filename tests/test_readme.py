"""README.md: every figure agrees with the committed result that it quotes, and the example runs."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from esper.leyline.config import TrainConfig, defaults_of, flatten
from esper.runtime.tasks import SUITES, find
from esper.simic.training import vectorized
from small_runs import SMALL

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
README = (ROOT / "README.md").read_text()

FREE_OF_RESULTS = ("Python 3.11", "8x8 pixels", "sb3-contrib")
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


def points(share: float) -> str:
    """Percentage points without decimals, and without a negative zero."""
    return str(round(100 * share) or 0)


def learning() -> list[str]:
    runs = read("learning_digits_shift.json")

    def ends(name: str) -> str:
        values = [run[name]["value"] for run in runs]
        return f"{points(min(values))} to {points(max(values))}"

    page = (RESULTS / "learning_digits_shift.md").read_text()
    envs, rounds = re.search(r"^(\d+) environments, (\d+) rounds", page, re.MULTILINE).groups()
    minutes = max(run["seconds"] for run in runs) / 60
    assert all(run["threads"] == 1 for run in runs)
    holds = sum(run["passed"] for run in runs)
    return [
        f"after {int(envs) * int(rounds)} episodes, grown networks are {ends('last')} percentage "
        f"points more accurate than their never-grow twins, on {holds} of {len(runs)} random "
        "seeds.",
        f"A random policy gains {ends('random')} points, the heuristic {ends('heuristic')}.",
        f"A run takes up to {minutes:.1f} minutes on one thread",
    ]


def paired() -> list[dict[str, Any]]:
    return [run for run in read("suite.json") if run["reward"] == "paired" and "last" in run]


def suite() -> list[str]:
    runs = paired()
    gains = [run["last"]["value"] for run in runs]
    spared = [run["seeds"]["digits"] <= run["seeds"]["digits_shift"] / 2 for run in runs]
    assert all(run["last"]["value"] > 2 * run["last"]["error"] for run in runs)
    return [
        f"On a suite of {len(SUITES['suite'])} tasks, utility is {points(min(gains))} to "
        f"{points(max(gains))} points above never growing, on {len(runs)} of {len(runs)} "
        f"random seeds. On {sum(spared)} of them the policy grows almost nothing on `digits`",
    ]


def speed() -> list[str]:
    native, torch = read("hot_path_digits.json")
    assert (native["backend"], torch["backend"]) == ("NativeBackend", "TorchBackend")
    assert native["threads"] == torch["threads"] == 2
    return [
        f"With the native backend, the whole training loop of {native['envs']} growing networks on "
        f"two cores runs {native['ratio']:.1f} times as fast as the same loop over ordinary "
        f"modules; with torch, {torch['ratio']:.1f} times as fast",
        f"they run on PyTorch, about {native['eps'] / torch['eps']:.0f} times slower",
    ]


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


def schedules() -> list[str]:
    tasks = read("tasks.json")
    shift, names = tasks["digits_shift"], SUITES["suite"]
    gain = shift["random"]["accuracy"] - shift["never"]["accuracy"]
    runs = read("learning_digits_shift.json")
    last = [run["last"]["value"] for run in runs]
    assert min(last) < gain < max(last)
    assert tasks["digits"]["random"]["schedule"] == "never"
    everywhere = sum(tasks[name]["suite"]["gain"] for name in names) / len(names)
    policy = table("suite.md", "reward")["paired"][0]
    value, error = (float(part) for part in policy.split(" ± "))
    return [
        f"The best of 100 random fixed schedules gains {100 * gain:.1f} points on `digits_shift`",
        f"One such schedule for all {len(names)} tasks gains {100 * everywhere:.1f} points of "
        "utility",
        f"the policy gains {value:.1f} ± {error:.1f}, on other hosts",
        "On `digits` the best of the 100 schedules is never to grow",
    ]


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
    gains = [float(row[3].split(" ± ")[0]) for row in rows[2:]]
    assert gains
    assert max(gains) <= 0
    return ["on `text_gpt` no seed that was tried beats never growing"]


def picture() -> list[str]:
    drawn = (ROOT / "docs" / "images" / "growth.svg").read_text()
    said = re.search(r"<desc>(.*)</desc>", drawn)[1]
    envs, gain = re.search(r"median gain of (\d+): ([+-][\d.]+) points", said).groups()
    host, grown = re.search(r"twin (\d+) parameters, grown host (\d+)", said).groups()
    assert int(host) == find("digits_shift").host.parameter_count
    return [
        f"The host started with {host} parameters and ended with {grown}.",
        f"of the {envs} environments in the last round of `esper train ppo`, it has the median "
        f"gain, {gain} percentage points of validation accuracy",
        f"The host of `digits_shift` has {host} parameters",
    ]


CLAIMS = (learning, suite, speed, gymnasium, schedules, recipes, text, picture)


def prose() -> str:
    """The README without blocks of code, headings and targets of links, as one line."""
    plain = re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL)
    plain = re.sub(r"\]\([^)]*\)", "]", plain)
    return " ".join(plain.split())


def block(after: str, language: str = "") -> list[str]:
    """Lines of the first block of code behind a text."""
    found = re.search(rf"^```{language}\n(.*?)^```", README.split(after)[1], re.M | re.S)
    return found[1].splitlines()


@pytest.mark.parametrize("claim", CLAIMS)
def test_figures_agree_with_committed_results(claim: Callable[[], list[str]]) -> None:
    # The link to the result stands within the sentence here and there.
    said = prose().replace(" ([results])", "").replace("([results])", "")
    for sentence in claim():
        assert sentence in said


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
    settings = flatten(TrainConfig()) | flatten(defaults_of("gym"))
    known = {name.replace("_", "-") for name in settings} | {"config-json", "resume"}
    flags = {flag.removeprefix("no-") for flag in re.findall(r"--([a-z][a-z-]+)", section)}
    assert flags - known == {"gym", "sanctum"}
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^\| `make ([a-z-]+)`", page, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
