"""``esper tasks`` lists all tasks, also a user's own, on any terminal, and fetches their data."""

import hashlib
import io
import re
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from scipy import stats

from cifar_files import write_binary
from esper.leyline.actions import Op
from esper.leyline.config import unflatten
from esper.leyline.errors import UsageError
from esper.runtime.gate import Permission
from esper.runtime.plugins import load
from esper.runtime.tasks import SUITES, TASKS, find, find_all
from esper.scripts.tasks import ARCHIVES, Archive, TasksArguments, show, tasks
from esper.simic.training.vectorized import run_training
from esper_lab import describe
from esper_lab.describe import STAGES, Diagnosis, Ending, PolicyResult
from esper_lab.worth import Worth

DOCS = Path(__file__).parents[2] / "docs"
MANUAL = (DOCS / "extending.md").read_text().split("\n## A task\n")[1].split("\n## ")[0]
WORTH = {
    "digits_shift": Worth(
        (7.0, 6.14, 7.86), 7.5, "conv_heavy in r0c0 from step 0", "never grow, tuned", 3.2
    )
}

pytestmark = pytest.mark.usefixtures("scratch_register")


def shown(names: list[str], terminal: bool = False, width: int = 80) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=width)
    show(console, find_all(names), WORTH)
    assert isinstance(console.file, io.StringIO)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue())


def manual_file(folder: Path) -> Path:
    """Save the example of the manual as a user would."""
    (source,) = re.findall(r"```python\n(.*?)```", MANUAL, re.DOTALL)
    path = folder / "stripes.py"
    path.write_text(source)
    return path


def own_task(folder: Path, name: str, summary: str, sizes: str = "") -> Path:
    """A file that registers a task."""
    path = folder / f"{name}.py"
    path.write_text(
        "from esper.kasmina.hosts.cnn import CnnHost\n"
        "from esper.runtime import data\n"
        "from esper.runtime.tasks import Task, task\n"
        "@task\n"
        f"def {name}() -> Task:\n"
        "    host = CnnHost(channels=(3, 5), classes=10, image=(8, 8, 1))\n"
        f"    return Task({name!r}, {summary!r}, host, data.digits{sizes})\n"
    )
    return path


def test_piped_output_is_plain_lines_of_80_columns_by_suite() -> None:
    text = shown(list(TASKS))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in text
    assert text.isascii()
    assert [line for line in lines if not line.startswith(" ")] == [
        "suite: the training suite",
        "held_out: the held-out suite",
        "cifar: the CIFAR-10 tasks; esper tasks fetch cifar10 downloads their data",
        "others",
    ]
    names = [line.strip() for line in lines if re.fullmatch(r"  \S+", line)]
    assert names == list(TASKS)


@pytest.mark.parametrize(("terminal", "width"), [(False, 80), (True, 80), (True, 140)])
def test_a_task_is_listed_with_all_its_properties(terminal: bool, width: int) -> None:
    text = shown(["digits_deep", "digits_shift", "digits_drift"], terminal, width)
    words = re.sub(r"[\s│┃]+", " ", text)
    for name in ("digits_deep", "digits_shift", "digits_drift"):
        assert name in words
    for wanted in ("conv 4-8-8", "1,030 parameters", "r0c0 r0c1 r0c2", "40"):
        assert wanted in words
    assert words.count("not measured") == 2
    if width == 80:
        assert "digits shifted by up to 2 pixels, noise 0.1" in words
        assert "+7.0 points [+6.1, +7.9], val. +7.5: conv_heavy in r0c0 from step 0" in words
        assert "instead never grow, tuned: +3.2 points" in words
        assert "drift 10 to 60 % into an episode, never in 33 % of episodes" in words
        assert "40 steps of 8 minibatches of 64" in words
    assert max(map(len, text.splitlines())) <= width


def test_a_wide_terminal_gets_one_table_per_suite_without_truncated_names() -> None:
    text = shown(list(TASKS), terminal=True, width=140)
    assert text.count("┏") == 4
    assert "…" not in text
    for name in TASKS:
        assert re.search(rf"│ {name} ", text), name
    assert "+7.0 points" in text
    assert "10 to 60 %" in re.sub(r"[\s│]+", " ", text)


def test_only_the_named_tasks_and_suites_are_shown(capsys) -> None:
    assert tasks(["digits_wide"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("held_out: the held-out suite\n  digits_wide\n    host     conv 8-16")
    assert "digits_deep" not in out
    assert tasks(["suite"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name}\n" in out for name in SUITES["suite"])
    assert "held_out" not in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("held-out", "did you mean 'held_out'"),
        ("--plugin a.py --plugin b.py", "plugin: .*contradict"),
        ("--describe digit", "did you mean 'digits'"),
        ("digits --describe digits", "describe: digits comes before --describe"),
        ("--describe digits --reward praise", "--reward: must be one of 'terminal'"),
        ("--describe digits --groups 1", "groups: must lie between 2 and 1024"),
        ("--describe digits --group-size x", "--group-size: must be a whole number"),
    ],
)
def test_an_unknown_task_or_a_wrong_description_is_a_usage_error(arguments: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        tasks(arguments.split())


def test_a_plugin_task_is_listed_with_the_others(tmp_path: Path, capsys) -> None:
    name = "a_task_with_a_name_as_long_as_one_may_wish_for"
    path = own_task(tmp_path, name, "what [bold]brackets[/bold] say")
    assert tasks(["--plugin", str(path)]) == 0
    out = capsys.readouterr().out
    assert f"\n  {name}\n    host     conv 3-5" in out.partition("\nothers\n")[2]
    assert "what [bold]brackets[/bold] say" in out
    assert "  digits_shift\n" in out
    for width in (80, 120, 160):
        text = shown([name], terminal=True, width=width)
        assert name in text
        assert "[bold]" in text


def test_the_example_of_the_manual_is_listed_and_trains(tmp_path: Path, capsys) -> None:
    path = manual_file(tmp_path)
    assert tasks(["stripes_in_noise", "--plugin", str(path)]) == 0
    shown_in_manual = re.findall(r"```\n(others\n.*?)```", MANUAL, re.DOTALL)
    assert [capsys.readouterr().out] == shown_in_manual
    before, after = find("stripes_in_noise").datasets()
    assert after.train_images.std() > before.train_images.std()
    settings = {"envs": 2, "group_size": 2, "rounds": 1, "episode_length": 3}
    settings |= {"task": "stripes_in_noise", "telemetry_dir": str(tmp_path)}
    summary = run_training(unflatten(settings), "ppo")
    assert summary.exit_code == 0
    assert len(summary.rounds) == 1


def test_a_plugin_may_already_be_loaded(tmp_path: Path, capsys) -> None:
    path = manual_file(tmp_path)
    load(str(path), Permission((str(path),)))
    assert tasks(["stripes_in_noise", "--plugin", str(path)]) == 0
    assert "stripes_in_noise" in capsys.readouterr().out


def test_a_users_own_suite_has_its_own_section() -> None:
    SUITES["mine"] = ("digits_long", "digits")
    assert "\nmine\n  digits\n" in shown(["digits"])
    names = re.findall(r"^  (\S+)$", shown(["mine"]).partition("\nmine\n")[2], re.MULTILINE)
    assert names == ["digits_long", "digits"]


def test_the_manual_describes_every_task_correctly() -> None:
    rows = {
        cells[0].strip("`"): cells[1:]
        for line in (DOCS / "tasks.md").read_text().splitlines()
        if len(cells := [cell.strip() for cell in line.strip("|").split("|")]) == 6
        and cells[0].startswith("`")
    }
    assert set(rows) == set(TASKS)
    for name, (summary, host, parameters, slots, steps) in rows.items():
        task = find(name)
        assert summary == task.summary, name
        assert host.replace("MLP", "mlp") == task.host.summary.removeprefix("conv "), name
        assert int(parameters.replace(",", "")) == task.host.parameter_count, name
        assert int(slots) == len(task.host.slots), name
        assert int(steps) == task.episode_length, name


def test_a_users_own_task_is_described(tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    path = own_task(tmp_path, "quick_digits", "digits", ", 30, 1, 8")
    sizes = ["--groups", "3", "--group-size", "4"]
    assert tasks(["--plugin", str(path), "--describe", "quick_digits", *sizes]) == 0
    out = capsys.readouterr().out
    for words in ("quick_digits", "never", "random", "heuristic", "everything", "FOSSILISED"):
        assert words in out
    assert "Gain is test utility minus that of the never-grow twin" in out
    assert re.search(r"\d+ % from init alone \(host and data\), \d+ % from actions alone", out)
    assert re.search(r"signal-to-noise ratio .* \d+\.\d+ in the reward of a step", out)


@pytest.mark.parametrize(("groups", "refused"), [(4, False), (5, True)])
def test_a_description_plays_as_many_environments_as_may_be(
    groups: int, refused: bool, monkeypatch
) -> None:
    monkeypatch.setattr(describe, "MAX_ENVIRONMENTS", 8)
    monkeypatch.setattr(describe, "diagnose", None)
    trial = TasksArguments(groups=groups, group_size=2, reward="paired")
    error, text = (UsageError, "are more than 8") if refused else (TypeError, "not callable")
    with pytest.raises(error, match=text):
        describe.describe(Console(), [find("digits")], trial)


def test_a_description_shows_test_with_validation_beside_it(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Made-up results of three hosts with two environments each; the interval is over hosts."""
    draws = np.random.default_rng(0)

    def ending(level: float) -> Ending:
        return Ending(*(torch.from_numpy(draws.normal(level, 0.1, 6)) for _ in range(4)))

    legal, reached = dict.fromkeys(Op, 1.0), dict.fromkeys(STAGES, 0.0)
    results = {
        name: PolicyResult(legal, reached, ending(level), ending(level + 0.3), torch.zeros(2, 6))
        for name, level in (("never", 0.2), ("everything", 0.5))
    }
    console = Console(file=io.StringIO(), width=100)
    diagnosis = Diagnosis(results, 0.1, 0.2, 0.7, 1.0, 2.0)
    monkeypatch.setattr(describe, "diagnose", lambda *arguments: diagnosis)
    trial = TasksArguments(groups=3, group_size=2, reward="paired")
    describe.describe(console, [find("digits")], trial)
    assert isinstance(console.file, io.StringIO)
    lines = [re.split(r" *[│┃] *", line) for line in console.file.getvalue().splitlines()]
    cells = {line[1]: line[2:-1] for line in lines if len(line) == 5}

    def means(split: str, figure: str, form: str) -> list[str]:
        rows = (getattr(getattr(one, split), figure) for one in results.values())
        return [f"{100 * values.mean():{form}}" for values in rows]

    assert cells["gain, points"] == means("test", "gain", "+.1f")
    assert cells["validation difference"] == means("validation", "gain", "+.1f")
    for figure, unit in (("utility", ", points"), ("accuracy", ", %")):
        assert cells[f"{figure} (test){unit}"] == means("test", figure, ".1f")
        assert cells[f"{figure} on validation"] == means("validation", figure, ".1f")
    hosts = 100 * results["everything"].test.gain.view(3, 2).mean(1).numpy()
    half = stats.t.ppf(0.975, 2) * stats.sem(hosts)
    expected = f"{hosts.mean() - half:+.1f}, {hosts.mean() + half:+.1f}"
    assert cells["95 % interval"][1] == expected


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def published(tmp_path: Path, monkeypatch) -> Iterator[Archive]:
    """Serve a small archive in place of the real one."""
    folder = write_binary(tmp_path / "source")
    path = tmp_path / "served" / "cifar.tar.gz"
    path.parent.mkdir()
    with tarfile.open(path, "w:gz") as archive:
        archive.add(folder, folder.name)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(path.parent)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    checksum = hashlib.sha256(path.read_bytes()).hexdigest()
    found = Archive(f"http://127.0.0.1:{server.server_port}/{path.name}", checksum)
    monkeypatch.setitem(ARCHIVES, "cifar10", found)
    yield found
    server.shutdown()
    server.server_close()


def test_a_published_archive_is_unpacked_and_read(published: Archive, tmp_path, capsys) -> None:
    place = tmp_path / "deep" / "data"
    assert tasks(["fetch", "cifar10", "--data-dir", str(place)]) == 0
    assert "36 images for training, 4 for validation, 8 for test" in capsys.readouterr().out
    assert [path.name for path in place.iterdir()] == ["cifar-10-batches-bin"]


@pytest.mark.parametrize("wrong", ["checksum", "address", "server"])
def test_a_damaged_or_absent_archive_leaves_nothing(
    published: Archive, tmp_path: Path, monkeypatch, wrong: str
) -> None:
    changed = {
        "checksum": Archive(published.url, "0" * 64),
        "address": Archive(published.url + "x", published.checksum),
        "server": Archive("http://127.0.0.1:9/x", published.checksum),
    }[wrong]
    monkeypatch.setitem(ARCHIVES, "cifar10", changed)
    words = "not have the published SHA-256" if wrong == "checksum" else "could not be downloaded"
    with pytest.raises(UsageError, match=words) as error:
        tasks(["fetch", "cifar10", "--data-dir", str(tmp_path / "data")])
    assert "\n" not in str(error.value)
    assert not list((tmp_path / "data").iterdir())


@pytest.mark.parametrize("names", [[], ["cifar100"], ["cifar10", "cifar10"]])
def test_an_unknown_archive_is_refused(names: list[str]) -> None:
    with pytest.raises(UsageError, match="name one of cifar10"):
        tasks(["fetch", *names])


def test_the_checksum_of_cifar10_is_the_published_one() -> None:
    assert ARCHIVES["cifar10"].url.startswith("https://www.cs.toronto.edu/~kriz/")
    assert len(ARCHIVES["cifar10"].checksum) == 64
