"""``esper grow --model``: a user's file, the twin, the files, and going on where it was stopped."""

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from esper.leyline import extras
from esper.leyline.disk import replace_sealed_json
from esper.leyline.errors import UsageError
from esper.leyline.events import GrowthEpochCompleted, GrowthFinished, GrowthStarted, encode
from esper.own_models.growing import grow as grow_module
from esper.own_models.growth_result import GrowthResult
from esper.runtime.gate import Permission
from esper.runtime.own_files import find_own
from esper.scripts import grow_model, grown_files
from esper.scripts.entry import run_guarded
from esper.scripts.grow import grow
from esper.scripts.grown_files import write_files
from esper.scripts.runs import runs
from esper.scripts.tasks import tasks
from own_modules import ResidualNet, images
from processes import ESPER, ran, ran_python, refusal

TESTS = Path(__file__).parents[1]
SOURCE = """
import os
import torch
from own_modules import ResidualNet, images, loader

EPOCH = 0

def model():
    return ResidualNet()

class Counted(torch.utils.data.DataLoader):
    def __iter__(self):
        global EPOCH
        EPOCH += 1
        if EPOCH == int(os.environ.get("KILL_AT", "0")):
            os.kill(os.getpid(), 9)
        return super().__iter__()

def loaders():
    train = torch.utils.data.TensorDataset(*images(48))
    return Counted(train, 16, shuffle=True), loader(*images(32, 1)), loader(*images(32, 2))
"""
FILES = {
    *("growth.svg", "model.onnx", "model.pt2", "rebuild.py"),
    *("result.json", "settings.json", "state_dict.pt", "events.jsonl", "events.lock"),
}


@pytest.fixture
def mine(tmp_path: Path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return str(path)


@pytest.fixture
def without_onnx(monkeypatch) -> None:
    """As if onnx were not installed: writing its file takes seconds."""
    found = extras.find_spec
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "onnx" else found(name))


@pytest.fixture
def without_programs(monkeypatch) -> None:
    """Exporting and drawing take seconds."""
    monkeypatch.setattr(grown_files, "_write_programs", lambda *_: {})
    monkeypatch.setattr(grown_files, "_draw", lambda *_: None)


SHORT = ["--policy", "rule", "--epochs", "16", "--lr", "0.01", "--schedule", "cosine"]

LOADS = """
import sys
sys.modules["esper"] = None
import torch
from own_modules import ResidualNet, images
sys.path.insert(0, sys.argv[1])
from rebuild import rebuild
x = images(5, 9)[0]
model = rebuild(ResidualNet(), sys.argv[1] + "/state_dict.pt").eval()
y = model(x)
program = torch.export.load(sys.argv[1] + "/model.pt2").module()
print(float((program(x) - y).abs().max()))
try:
    program.train()
except NotImplementedError:
    print("train() refused")
before = {n: p.detach().clone() for n, p in model.named_parameters()}
model.train()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(x).square().mean().backward()
optimizer.step()
print(sum(bool((p != before[n]).any()) for n, p in model.named_parameters()))
"""


def test_a_models_files_load_and_train_on_without_esper(mine: str, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    assert grow(["--model", mine, *SHORT, "--price", "0", "--out", str(out), "--keep"]) == 0
    text = capsys.readouterr().out
    assert len(re.findall(r"^epoch +\d+/16 ", text, re.MULTILINE)) == 32
    assert re.search(r"^grown +accuracy [\d.]+ % +accuracy [\d.]+ % +[\d,]+ +[\d.]+ s$", text, re.M)
    assert re.search(r"^never grown +accuracy .* s$", text, re.MULTILINE)
    assert {path.name for path in out.iterdir()} == FILES
    result = json.loads((out / "result.json").read_text())
    assert result["seeds"]
    assert result["chosen_is_grown"]
    done = ran_python(LOADS, str(out), PYTHONPATH=str(TESTS))
    assert done.returncode == 0, done.stderr
    differs, refused, trained = done.stdout.splitlines()
    assert float(differs) <= 1e-5
    assert refused == "train() refused"
    assert int(trained) > len(list(ResidualNet().parameters()))
    program = torch.export.load(out / "model.pt2").module()
    for count in (1, 7):
        assert program(images(count)[0]).shape == (count, 4)


def test_a_killed_command_resumes_bit_identically(
    mine: str, tmp_path: Path, capsys, without_programs: None
) -> None:
    """It is killed in the fifth epoch of the second try; Esper reads the loader once before."""
    command = ["--model", mine, *SHORT, "--tries", "2", "--out"]
    assert grow([*command, str(tmp_path / "whole")]) == 0
    whole = capsys.readouterr().out
    assert len(re.findall(r"kept try [12] of 2, the best on validation", whole)) == 2
    cut = tmp_path / "cut"
    path = os.pathsep.join([str(TESTS), str(TESTS.parent / "src")])
    killed = ran([*ESPER, "grow", *command, str(cut)], KILL_AT="22", PYTHONPATH=path)
    assert killed.returncode == -9, killed.stderr
    begun = {"settings.json", "progress.pt", "lock", "events.jsonl", "events.lock"}
    assert {path.name for path in cut.iterdir()} == begun
    assert grow([*command, str(cut)]) == 0
    assert "resuming after epoch 4 from " in capsys.readouterr().out
    states = [torch.load(tmp_path / name / "state_dict.pt") for name in ("whole", "cut")]
    assert list(states[0]) == list(states[1])
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    results = [json.loads((tmp_path / n / "result.json").read_text()) for n in ("whole", "cut")]
    for result in results:
        for each in ("grown", "twin"):
            del result[each]["seconds"]
        del result["text"], result["checksum"]
    assert results[0] == results[1]
    assert grow([*command, str(cut)]) == 0
    again = capsys.readouterr().out
    assert "was finished before" in again
    assert "never grown" in again


def test_runs_lists_grown_networks_with_their_gain(tmp_path: Path, capsys) -> None:
    start = GrowthStarted(
        time=1.0, schema=4, model="Net", policy="widen", epochs=3, tries=1, price=0.01, parameters=9
    )  # fmt: skip
    end = GrowthFinished(
        time=9.0, unit="accuracy", validation=[0.9, 0.85], parameters=[12, 9], seconds=[2.0, 1.0],
        paid=True, verdict="growth paid", grew={}, test=[0.9, 0.92],
    )  # fmt: skip
    epochs = [
        GrowthEpochCompleted(
            time=2.0, variant=variant, attempt=1, epoch=epoch, unit="accuracy", figure=0.5,
            loss=1.0, train_loss=1.0, parameters=9, stages={}, actions=[],
        )
        for variant in ("grown", "twin")
        for epoch in (1, 2, 3)
    ]  # fmt: skip
    for name, events in (
        ("done", [start, *epochs, end]),
        ("cut", [start, *epochs[:2]]),
        ("begun", [start]),
    ):
        folder = tmp_path / name
        folder.mkdir()
        replace_sealed_json(
            folder / "settings.json", {"epochs": 3, "model": "m.py", "policy": "widen"}
        )
        (folder / "lock").touch()
        (folder / "events.jsonl").write_bytes(b"".join(encode(e) + b"\n" for e in events))
    replace_sealed_json(tmp_path / "done" / "result.json", {})
    assert runs([str(tmp_path)]) == 0
    lines = {
        line.split()[0].rpartition("/")[2]: line
        for line in capsys.readouterr().out.splitlines()
        if line.split()
    }
    assert re.search(r"finished +3/3 +-2\.0 +\+5\.0 +widen +m.py", lines["done"])
    assert re.search(r"interrupted +2/3 +- +- +widen +m.py", lines["cut"])
    assert re.search(r"interrupted +0/3 +- +- +widen +m.py", lines["begun"])


def test_growth_that_did_not_pay_hands_back_the_twin(
    mine: str, tmp_path: Path, capsys, monkeypatch, without_onnx: None
) -> None:
    monkeypatch.setattr(GrowthResult, "paid", property(lambda self: False))
    out = tmp_path / "out"
    assert grow(["--model", mine, *SHORT, "--price", "0", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    said = r"growth did not pay: grown accuracy [\d.]+ % .* against .*: [+-][\d.]+ \[.*\] points"
    assert re.search(rf"{said} on validation", text)
    assert "the never-grown twin is written; --keep writes the grown network" in text
    assert "no model.onnx: needs the library onnx; pip install 'esper-growth[onnx]'" in text
    result = json.loads((out / "result.json").read_text())
    assert result["seeds"]
    assert not result["chosen_is_grown"]
    state = torch.load(out / "state_dict.pt")
    assert not any(".seed." in name for name in state)
    assert state.keys() == ResidualNet().state_dict().keys()


def test_a_file_may_import_its_neighbours(mine: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "only_a_neighbour.py").write_text("WIDTH = 3")
    path = folder / "its_model.py"
    path.write_text(
        "from only_a_neighbour import WIDTH\nfrom torch import nn\n"
        "def model():\n    return nn.Linear(WIDTH, 1)\n"
    )
    own = find_own(str(path), mine, Permission((str(path), mine)))
    assert own.build().in_features == 3


@pytest.mark.parametrize("error", [KeyboardInterrupt(), UsageError("epochs: too few")])
def test_only_who_stops_it_is_told_how_growth_goes_on(
    error: BaseException, mine: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    def stopped(settings: object, source: object, arguments: object, folder: Path) -> None:
        (folder / grow_model.PROGRESS).touch()
        raise error

    monkeypatch.setattr(grow_model, "_grown", stopped)
    run_guarded(grow, ["--model", mine, "--epochs", "2", "--out", str(tmp_path / "out")])
    told = "stopped; rerun the same command to resume" in capsys.readouterr().out
    assert told == isinstance(error, KeyboardInterrupt)


def test_an_error_of_a_file_is_described_even_without_a_message(mine: str) -> None:
    own = find_own(mine, None, Permission((mine,)))
    assert own.describe(ValueError()) == "ValueError: no message"
    assert own.describe(ValueError(" too\nlong")) == "ValueError: too"


@pytest.fixture
def written(mine: str, tmp_path: Path) -> Callable[..., int]:
    """Writes the files of a trained network as the command does; the exit status."""
    own, out = find_own(mine, None, Permission((mine,))), tmp_path / "out"
    out.mkdir()

    def write(onnx: Path | None = None) -> int:
        read = own.loaders()
        trained = own.build()
        result = grow_module(
            trained, read.train, read.validation, policy="never", epochs=1, progress=False
        )
        return write_files(out, result, result, own, images(4)[0], onnx, "")

    return write


def failing(*_: Any, **__: Any) -> Any:
    raise RuntimeError("no such operator\nand more")


@pytest.mark.parametrize("asked", [False, True])
def test_an_onnx_file_that_cannot_be_made_fails_the_command_that_asked_for_it(
    asked: bool, written, tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.setattr(grown_files, "onnx_bytes", failing)
    onnx = tmp_path / "mine.onnx"
    assert written(onnx if asked else None) == asked
    said = capsys.readouterr()
    assert "no model.onnx: torch.onnx cannot write the model (no such operator)\n" in said.out
    expected = f"esper: onnx: {onnx} was not written, for the reason above\n" if asked else ""
    assert said.err == expected
    assert not onnx.exists()
    assert (tmp_path / "out" / "result.json").exists()


@pytest.mark.parametrize("name", ["model.pt2", "model.onnx"])
def test_a_file_that_cannot_be_read_back_is_not_reported_as_untraceable(
    name: str, written, tmp_path: Path, capsys, monkeypatch
) -> None:
    read = {"model.pt2": "outputs_of_file", "model.onnx": "outputs_of_onnx"}[name]
    monkeypatch.setattr(grown_files, "onnx_bytes", lambda *_, **__: b"")
    monkeypatch.setattr(grown_files, "outputs_of_onnx", lambda content, inputs: torch.zeros(4, 4))
    monkeypatch.setattr(grown_files, "difference", lambda one, two: 0.0)
    monkeypatch.setattr(grown_files, read, failing)
    assert written() == 0
    text = capsys.readouterr().out
    line = f"no {name}: the exported file cannot be read back and run (no such operator)\n"
    assert line in text
    assert "cannot trace" not in text
    found = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"model.pt2", "model.onnx"} - found == {name}


def test_several_seeds_end_in_one_table(
    mine: str, tmp_path: Path, capsys, without_programs: None
) -> None:
    short = ["--epochs", "2", "--policy", "heuristic", "--name", "both"]
    assert grow(["--model", mine, *short, "--seeds", "2", "--seed", "7"]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("seed  grown")) :]
    assert [line.split()[0] for line in table[1:4]] == ["7", "8", "mean"]
    assert "gains are in points of accuracy; ± is the standard deviation over seeds" in table
    assert "growth paid on validation after its price in 0 of 2 seeds" in table[-1]
    folder = tmp_path / "grown" / "both"
    accuracies = [
        json.loads((folder / f"seed-{s}" / "result.json").read_text())["grown"]["test"]["accuracy"]
        for s in (7, 8)
    ]
    for accuracy, row in zip(accuracies, table[1:3], strict=True):
        assert f"{100 * accuracy:.1f} %" in row
    mean = 100.0 * torch.tensor(accuracies, dtype=torch.float64)
    assert f"{mean.mean():.1f} ± {mean.std():.1f} %" in table[3]


def test_a_network_that_lost_its_seeds_is_not_taken_for_one_that_never_grew(
    mine: str, tmp_path: Path, capsys, without_programs: None
) -> None:
    costly = ["--model", mine, *SHORT, "--price", "100"]
    assert grow([*costly, "--out", str(tmp_path / "grown")]) == 0
    text = capsys.readouterr().out
    assert "nothing that grew was kept: " in text
    assert "the never-grown twin is written; --keep writes the network that lost its seeds" in text
    never = ["--policy", "never", *SHORT[2:], "--out", str(tmp_path / "no")]
    assert grow(["--model", mine, *never]) == 0
    states = [torch.load(tmp_path / name / "state_dict.pt") for name in ("grown", "no")]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    result = json.loads((tmp_path / "grown" / "result.json").read_text())
    assert not result["chosen_is_grown"]
    assert not result["paid"]
    capsys.readouterr()
    assert grow([*costly, "--keep", "--out", str(tmp_path / "kept")]) == 0
    assert "the network that lost its seeds is written because of --keep" in capsys.readouterr().out
    kept = torch.load(tmp_path / "kept" / "state_dict.pt")
    assert any(not torch.equal(value, states[1][name]) for name, value in kept.items())


def test_a_recipe_of_the_file_is_used_and_flags_come_first(
    mine: str, tmp_path: Path, capsys, monkeypatch
) -> None:
    recipe = """
def recipe(epochs):
    from torch.optim import SGD
    return {"optimizer": lambda p: SGD(p, lr=0.5), "clip": 0.1 * epochs, "loss": "cross_entropy"}
"""
    Path(mine).write_text(SOURCE + recipe)
    seen: dict[str, Any] = {}

    def stop(*_: object, **arguments: Any) -> None:
        seen.update(arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(grow_model, "grow", stop)
    for flags, clip, lr in (([], 0.2, 0.5), (["--clip", "3", "--optimizer", "adam"], 3.0, 1e-3)):
        assert run_guarded(grow, ["--model", mine, "--epochs", "2", *flags]) == 130
        assert (seen["clip"], seen["epochs"]) == (clip, 2)
        made = seen["optimizer"]([torch.nn.Parameter(torch.zeros(1))])
        assert made.param_groups[0]["lr"] == lr
        assert not (tmp_path / "grown").exists()


def test_usage_errors_are_one_line_and_leave_nothing(
    mine: str, tmp_path: Path, capsys, monkeypatch
) -> None:
    other = tmp_path / "other.py"
    other.write_text(
        "import torch\n"
        "def model():\n    return 3\n"
        "def loaders():\n    return 1, 2, 3, 4\n"
        "class Net(torch.nn.Linear):\n"
        "    def __init__(self):\n        super().__init__(2, 2)\n"
        "def recipe(epochs):\n    return {'optimiser': 1}\n"
    )
    full = tmp_path / "full"
    full.mkdir()
    (full / "notes.txt").write_text("mine")
    plain = tmp_path / "plain.py"
    plain.write_text(other.read_text().partition("def recipe")[0])
    cases: list[tuple[list[str], str]] = [
        ([], "model: esper grow needs --model FILE.py, or --task"),
        (["--model", mine, "--task", "digits"], "task: --task and --model contradict"),
        (["--task", "digits", "--tries", "3"], "tries: --tries belongs to --model"),
        (["--model", mine, "--greedy"], "greedy: --greedy belongs to --task"),
        (["--model", "none.py"], "model: cannot read 'none.py'"),
        (["--model", f"{mine}:modle"], "model: .*no function 'modle'; did you mean 'model'"),
        (["--model", mine, "--data", f"{mine}:data"], "data: .* has no function 'data'"),
        (["--model", str(other)], "recipe: it has no entry 'optimiser'; did you mean 'optimizer'"),
        (["--model", str(plain)], "model: .*:model returns a int; return an nn.Module"),
        (["--model", f"{plain}:Net"], "data: .*:loaders must return the loaders"),
        (["--model", f"{plain}:Net", "--data", mine], "train_loader: model or loss fails on its "),
        (
            ["--model", mine, "--policy", "nowhere"],
            "policy: 'nowhere' is neither one of deepen, heuristic, ",
        ),
        (["--model", mine, "--out", "m.pt2"], "out: with --model several files are written"),
        (["--model", mine, "--out", str(full)], "out: .* is not empty"),
        (["--model", mine, "--onnx", "m.pt2"], "onnx: m.pt2 must end in .onnx"),
        (["--model", mine, "--loss", "mes"], "loss: 'mes' is not one of cross_entropy"),
        (["--model", mine, "--device", "gpu"], "device: gpu is not usable"),
        (["--model", mine, "--max-parameters", "5"], "max_parameters: the module has"),
        (["--model", mine, "--epochs", "0"], "epochs: must lie between 1"),
        (["--model", mine, "--name", "../beside"], "name: must be 1 to 60 letters"),
        (["--model", mine, "--seed", "4294967295", "--seeds", "2"], "seeds: the last seed is"),
        (["--model", mine, "--policy", "rulee"], "did you mean 'rule'"),
        (["--model", mine, "--optimizer", "sgd", "--lr", "1e30"], "lr: the validation loss is "),
        (["--model", mine, "--slots", "stm"], "slots: ResidualNet has no module 'stm'"),
    ]
    for flags, says in cases:
        error = refusal(capsys, grow, *flags, prints=True)
        assert re.search(says, error), (flags, error)
        assert not (tmp_path / "grown").exists(), flags
    assert [path.name for path in full.iterdir()] == ["notes.txt"]


def test_a_folder_of_other_settings_is_left_alone(
    mine: str, tmp_path: Path, capsys, without_programs: None
) -> None:
    command = ["--model", mine, "--epochs", "1", "--policy", "never"]
    assert grow(command) == 0
    text = capsys.readouterr().out
    assert "trained without growing" in text
    assert runs([]) == 0
    assert re.search(
        r"grown/mine +✓ finished +1/1 +- +- +never +\S*mine.py:model", capsys.readouterr().out
    )
    assert "never grown" not in text
    folder = tmp_path / "grown" / "mine"
    before = {path: path.read_bytes() for path in folder.iterdir()}
    for flags, says in (
        (["--seed", "3"], "seed: growth in .* began with 42, got 3"),
        (["--lr", "0.1"], "lr: growth in .* began with None, got 0.1"),
    ):
        assert re.search(says, refusal(capsys, grow, *command, *flags))
    Path(mine).write_text(SOURCE + "\n")
    assert "model: the file changed since growth in" in refusal(capsys, grow, *command)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_tasks_check_reports_a_model(mine: str, capsys) -> None:
    for named in (mine, f"{mine}:model"):
        assert tasks(["check", named, "--epochs", "10"]) == 0
        text = capsys.readouterr().out
        assert text.startswith("ResidualNet fits\n")
        assert "slot     layer1.0: 4 channels of 8x8" in text
        assert "splits   train 48, validation 32, test 32; target int64 [16]" in text
        assert re.search(r"policy   training one on this model: .* GiB", text)
        assert "growing  10 epochs of training" in text


def test_a_model_that_does_not_fit_is_one_line(mine: str, capsys) -> None:
    Path(mine).write_text(SOURCE.replace("return ResidualNet()", "return torch.nn.Linear(3, 4)"))
    error = refusal(capsys, tasks, "check", mine, prints=True)
    assert re.fullmatch(r"esper: \S+mine.py:model: model or loss fails on a batch: .*\n", error)
    # A process runs each file once.
    other = Path(mine).with_name("other.py")
    other.write_text(SOURCE.replace("return ResidualNet()", "return torch.nn.Flatten(0)"))
    error = refusal(capsys, tasks, "check", str(other), prints=True)
    assert re.fullmatch(r"esper: model: no parameter requires a gradient, .*\n", error)
    Path(mine).with_name("none.py").write_text("x = 1\n")
    error = refusal(capsys, tasks, "check", "none.py")
    assert "has no task; write one with @task, or the functions model and loaders" in error
