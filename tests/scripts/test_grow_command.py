"""``esper grow`` and ``esper tasks check``: results and costs, or a usage error in one line."""

import importlib.util
import math
import re
from pathlib import Path

import pytest
import torch

from esper.kasmina.hosts.host import resolve_slots
from esper.leyline.errors import UsageError
from esper.runtime.tasks import TASKS, Task, find
from esper.scripts import grow_task
from esper.scripts.entry import run_guarded
from esper.scripts.grow import grow
from esper.scripts.tasks import tasks
from esper.simic.growth.environment import GrowthEnv
from esper.simic.growth.step import Step
from esper.simic.tools import task_check
from esper.simic.tools.grow import GrowingPolicy, grow_on_task
from esper.simic.training.vectorized import train_ppo_vectorized
from esper.tolaria.export import TOLERANCE, difference
from esper_lab import describe
from processes import ran_python, refusal
from small_runs import SMALL
from support import own_blueprints

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_model.py"
PLAIN = EXAMPLE.read_text()
SHORT = """
from dataclasses import replace
from esper.runtime.tasks import find, task

@task
def short():
    return replace(find("digits_shift"), name="short", episode_length=LENGTH, max_batches=2)
"""

pytestmark = pytest.mark.usefixtures("scratch_register")


@pytest.fixture
def short(tmp_path: Path) -> list[str]:
    """Flags that register a short task."""
    path = tmp_path / "short.py"
    path.write_text(SHORT.replace("LENGTH", "16"))
    return ["--plugin", str(path), "--task", "short"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run that has learned almost nothing."""
    place = {"rounds": 1, "split_seed": 5, "telemetry_dir": str(tmp_path_factory.mktemp("runs"))}
    return train_ppo_vectorized(**SMALL | place | {"envs": 8, "episode_length": 6}).path


def test_the_example_is_as_short_as_the_manual_says() -> None:
    code = [line for line in EXAMPLE.read_text().splitlines() if line.strip()]
    assert len(code) < 30
    manual = (EXAMPLE.parents[1] / "docs" / "extending.md").read_text().split("\n## A model\n")[1]
    (shown,) = re.findall(r"```python\n(.*?)```", manual, re.DOTALL)
    for part in shown.split("\n\n\n"):
        assert part in PLAIN


def test_the_heuristic_grows_a_host_and_the_file_computes_the_same(tmp_path: Path, capsys) -> None:
    out = tmp_path / "model.pt2"
    assert grow(["--policy", "heuristic", "--task", "digits_shift", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert re.search(r"step +\d+  r0c\d: conv_light germinates, LINEAR_ADD, to alpha 1.0", text)
    assert re.search(r"becomes FOSSILISED", text)
    assert re.search(
        r"grown: r0c\d \(conv_light, LINEAR_ADD, alpha 1\).* \d+ parameters added", text
    )
    assert len(re.findall(r"(validation|test) accuracy: .* %, its never-grow twin .* %", text)) == 2
    grown = grow_on_task(GrowingPolicy.named("heuristic"), find("digits_shift"))
    price = 0.05 * math.log(1.0 + grown.added / 438)
    own, twin = (scores["test"].expected for scores in (grown.scores, grown.twin_scores))
    assert grown.gain == pytest.approx(100.0 * float(own - twin - price), abs=1e-3)
    assert f"gain: {grown.gain:+.1f} points of test utility" in text
    assert f"on validation {grown.validation_gain:+.1f}" in text
    module = torch.export.load(out).module()
    assert difference(grown.logits, module(grown.images)) <= TOLERANCE
    accuracy = 100 * float(grown.scores["test"].accuracy)
    assert f"test accuracy: {accuracy:.1f} %" in text
    # The accuracy of the exported file alone, on the data themselves.
    data = find("digits_shift").datasets()[0]
    hits = module(data.test_images.permute(0, 3, 1, 2)).argmax(1) == data.test_labels
    assert 100 * float(hits.float().mean()) == pytest.approx(accuracy, abs=0.4)


def test_the_rule_plants_in_every_slot_of_a_task(tmp_path: Path, capsys) -> None:
    task = ["--task", "digits_shift", "--out", str(tmp_path / "m.pt2")]
    assert grow(["--policy", "rule", *task]) == 0
    text = capsys.readouterr().out
    assert re.search(r"r0c0: \w+ germinates, LINEAR_ADD", text)
    assert re.search(r"r0c1: \w+ germinates, LINEAR_ADD", text)


def test_layers_become_wider_in_the_slots_of_the_command_or_of_the_run(
    short, tmp_path: Path, capsys, monkeypatch
) -> None:
    out = ["--out", str(tmp_path / "m.pt2")]
    assert grow(["--policy", "rule", *short, "--slots", "wide", *out]) == 0
    text = capsys.readouterr().out
    assert set(re.findall(r"(\w+): conv_small germinates", text)) == {"wide0", "wide1"}
    assert re.search(r"r0c\d: ", text) is None
    place = {"rounds": 1, "telemetry_dir": str(tmp_path), "slots": ("wide1", "late")}
    world = {"task": "short", "envs": 8, "episode_length": 6}
    run = train_ppo_vectorized(**SMALL | place | world).path
    chosen: list[tuple[str, ...]] = []

    def stop(policy: GrowingPolicy, task: Task, *arguments: object) -> None:
        chosen.append(task.host.slot_names)
        raise UsageError("enough")

    monkeypatch.setattr(grow_task, "grow_on_task", stop)
    other_task = [*short[:3], "digits_narrow"]
    for words in (short, [*short, "--slots", "r0c0"], other_task):
        assert run_guarded(grow, ["--policy", str(run), *words, *out]) == 2
    assert chosen.pop() == ()
    assert [set(names) for names in chosen] == [{"wide1", "r0c1"}, {"r0c0"}]
    refused = run_guarded(grow, ["--policy", "rule", *short, "--slots", "width", *out])
    assert (refused, "slots: the host has no slot 'width'" in capsys.readouterr().err) == (2, True)


def test_the_never_policy_leaves_the_host_equal_to_its_twin(short, tmp_path: Path, capsys) -> None:
    assert grow(["--policy", "never", *short, "--out", str(tmp_path / "m.pt2")]) == 0
    text = capsys.readouterr().out
    assert "grown: nothing, 0 parameters added" in text
    assert "gain: +0.0 points" in text
    assert "on validation +0.0" in text


def test_a_learned_policy_samples_by_seed_or_acts_greedily(run: Path, short) -> None:
    tasks([short[3], *short[:2]])
    policy = GrowingPolicy.named(str(run))
    task, seeds = find("short"), range(6)
    drawn = [grow_on_task(policy, task, seed=s).decisions for s in seeds]
    assert drawn[1] == grow_on_task(policy, task, seed=1).decisions
    assert len({tuple(lines) for lines in drawn}) > 1
    greedy = [grow_on_task(policy, task, seed=s, greedy=True).decisions for s in seeds]
    assert greedy == [grow_on_task(policy, task, seed=s, greedy=True).decisions for s in seeds]
    assert greedy != drawn


@pytest.fixture
def asked(monkeypatch) -> list[tuple[str, object]]:
    """The policies that ``esper grow`` would grow with, and whether greedily; it stops there."""
    policies: list[tuple[str, object]] = []

    def stop(policy: GrowingPolicy, *arguments: object) -> None:
        policies.append((policy.name, arguments[-1]))
        raise UsageError("enough")

    monkeypatch.setattr(grow_task, "grow_on_task", stop)
    return policies


def test_a_policy_that_learned_from_records_is_greedy_by_default(
    run: Path, short, tmp_path: Path, asked
) -> None:
    for policy in (str(run), "keep-or-move"):
        for flags in ([], ["--greedy"], ["--no-greedy"]):
            out = ["--out", str(tmp_path / "m.pt2")]
            with pytest.raises(UsageError, match="enough"):
                grow(["--policy", policy, *short, *out, *flags])
    assert [greedy for _, greedy in asked] == [False, True, False, True, True, False]


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("one_seed:3", "keep-or-move"),
        ("one_seed:1000003", "keep-or-move"),
        ("adaptation:3", "rule"),
    ],
)
def test_without_a_policy_the_trained_one_grows_what_it_learned_on(
    task: str, expected: str, tmp_path: Path, asked, capsys
) -> None:
    with pytest.raises(UsageError, match="enough"):
        grow(["--task", task, "--out", str(tmp_path / "m.pt2")])
    assert asked == [(expected, expected != "rule")]
    printed = capsys.readouterr().out
    assert printed.startswith(f"policy: {expected}\n")
    assert "untested" not in printed


@pytest.mark.parametrize(
    ("flags", "expected"), [([], [0, 0, 5]), (["--split-seed", "6"], [6, 6, 6])]
)
def test_commands_split_the_data_with_the_seed(
    flags: list[str], expected: list[int], run: Path, short, tmp_path: Path, monkeypatch
) -> None:
    """By default ``esper grow`` takes the seed of the policy's run."""
    split: list[int | None] = []

    def stop(*arguments: object) -> None:
        split.extend(a.split_seed for a in arguments if isinstance(a, Task))
        raise UsageError("enough")

    for name in ("scripts.tasks.try_task", "scripts.grow_task.grow_on_task"):
        monkeypatch.setattr(f"esper.{name}", stop)
    monkeypatch.setattr(describe, "diagnose", stop)
    out = ["--out", str(tmp_path / "m.pt2")]
    calls = [
        (tasks, ["check", short[1]]),
        (tasks, ["--describe", "digits"]),
        (grow, ["--policy", str(run), *short, *out]),
    ]
    for command, arguments in calls:
        with pytest.raises(UsageError, match="enough"):
            command([*arguments, *flags])
    assert split == expected


def test_a_policy_trained_on_digits_grows_a_users_own_model(
    run: Path, tmp_path: Path, capsys
) -> None:
    out, path = tmp_path / "own.pt2", tmp_path / "mine.py"
    path.write_text(PLAIN)
    arguments = ["--policy", str(run), "--plugin", str(path), "--task", "own_model"]
    assert grow([*arguments, "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "own_model: module Net, 472 parameters" in text
    assert "takes images [B, 1, 8, 8], gives logits [B, 10]" in text
    names = torch.export.load(out).state_dict
    assert {"stem.weight", "block.0.running_mean", "head.bias"} <= names.keys()
    assert resolve_slots(find("own_model").host, ("mid",)) == ("grows",)


def test_a_usage_error_is_one_line_and_leaves_no_file(
    run: Path, short, tmp_path: Path, capsys, monkeypatch
) -> None:
    out = tmp_path / "m.pt2"
    flags = {"--policy": "never", "--task": "digits", "--out": str(out)}
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text((run / "config.json").read_text())
    cases = [
        ({"--out": None}, "out: esper grow --task needs --out"),
        ({"--policy": "nowhere"}, "policy: 'nowhere' is neither one of heuristic, ru"),
        ({"--policy": str(broken)}, "policy: .* has no checkpoint; give another run"),
        ({"--task": "digit"}, "did you mean 'digits'"),
        ({"--out": "m.onnx"}, "out: m.onnx must end in .pt2"),
        ({"--out": str(tmp_path / "no" / "m.pt2")}, "out: cannot write"),
        ({"--onnx": "m.pt2"}, "onnx: m.pt2 must end in .onnx"),
        ({"--onnx": str(tmp_path / "m.onnx")}, "onnx: needs the library onnxscript; pip install"),
        ({"--seed": "-1"}, "seed: must lie between 0"),
    ]
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "esper.leyline.extras.find_spec", lambda name: None if name == "onnxscript" else found(name)
    )
    for change, says in cases:
        chosen = {name: value for name, value in (flags | change).items() if value is not None}
        error = refusal(capsys, grow, *(part for pair in chosen.items() for part in pair))
        assert re.search(says, error), error
        assert not out.exists()


def test_check_reports_fit_and_costs(tmp_path: Path, capsys) -> None:
    path = tmp_path / "mine.py"
    path.write_text(PLAIN)
    assert tasks(["check", str(path)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("own_model fits\n  host     module Net, 472 parameters\n")
    assert "slot     grows: 6 channels of 8x8; parameters of conv_light 336, " in text
    assert "1,197 / 300 / 300 images (8, 8, 1), 10 classes" in text
    assert "backend functional" in text
    assert re.search(r"memory   [\d.]+ MiB per environment, \d+ MiB for 32", text)
    assert re.search(r"time     [\d.]+ ms per environment step on one thread, \d+ (s|min)", text)


def test_a_trial_grows_every_slot_at_once_and_may_know_no_memory(monkeypatch) -> None:
    living = []

    class Environment(GrowthEnv):
        def step(self, actions: torch.Tensor) -> Step:
            result = super().step(actions)
            living.append(result.report.after.living)
            return result

    monkeypatch.setattr(task_check, "GrowthEnv", Environment)
    monkeypatch.setattr(task_check, "peak_resident", lambda: None)
    trial = task_check.try_task(find("digits_shift"), "torch")
    assert bool(living[living[0].shape[1]].all())
    assert trial.bytes is None
    assert (trial.backend, trial.seconds > 0) == ("torch", True)


MEMORY = """
from esper.runtime.tasks import find
from esper.simic.tools.task_check import try_task
found = try_task(find("digits_shift"), "torch")
print(found.backend, found.bytes)
"""


@pytest.mark.slow
def test_the_reported_memory_is_close_to_that_of_the_benchmark() -> None:
    """In a separate process: one that has run for long would reuse freed memory."""
    backend, reported = ran_python(MEMORY).stdout.split()
    assert backend == "torch"
    if reported == "None":
        pytest.skip("this system does not tell how much memory a process has")
    assert 1 < float(reported) / 2**20 < 8


FAULTS = [
    ("x = 1\n", "plugin: .* has no task"),
    (PLAIN.replace("Slot(6), nn", "nn.Identity(), nn"), "own_model: model: Net has no slot"),
    (PLAIN.replace("Net, 10, (8, 8, 1)", "Net, 10, (8, 8, 2)"), "own_model: .*images .8, 8, 1."),
    (PLAIN.replace("/ 16, y", "/ 0.0, y"), "own_model: learning_rate: the loss is not finite"),
    (PLAIN.replace("classes=10", "classes=9"), "own_model: data: .* labels of the train split"),
    (PLAIN.replace("/ 16, y", "/ 16, y.float()"), "labels of the train split are torch.float32"),
    (PLAIN.replace("nn.Linear(6, 10)", "nn.Linear(7, 10)"), "own_model: model: Net rejects imag"),
]


@pytest.mark.parametrize(("source", "says"), FAULTS, ids=[says[-24:] for _, says in FAULTS])
def test_a_task_that_does_not_fit_is_reported_in_one_line(
    source: str, says: str, tmp_path, capsys
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(source)
    assert run_guarded(tasks, ["check", str(path)]) == 2
    error = capsys.readouterr().err.splitlines()
    assert re.search(says, error[-1]), error
    assert error[-1].startswith("esper: ")
    assert "own_model" not in TASKS or not capsys.readouterr().out


def test_a_failing_blueprint_is_found_even_if_others_are_larger(tmp_path: Path, capsys) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from esper.kasmina.blueprints import Blueprint, register\n"
        "from esper.kasmina.stack import zeros\n"
        "register('cut', lambda c: Blueprint((zeros('s'),), lambda p, x: x[..., :1, :2]))\n" + PLAIN
    )
    with own_blueprints():
        assert run_guarded(tasks, ["check", str(path)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("esper: own_model: a step fails (")
