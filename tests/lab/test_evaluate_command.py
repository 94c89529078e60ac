"""``esper evaluate``: the table, the files, and bad input in one line."""

import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace as replace_fields
from rich.console import Console
from rich.progress import Progress, TaskID

from esper.karn.report import write_report
from esper.leyline.errors import UsageError
from esper.runtime.tasks import Family, Task, add_family
from esper.scripts import progress_lines
from esper.scripts.entry import run_guarded
from esper.scripts.main import esper
from esper.simic.training.vectorized import train_ppo_vectorized
from esper_lab import baselines, controls, ladder, play, rules, shipped_controls
from esper_lab import evaluate as command
from esper_lab.baselines import FINE_TUNING
from esper_lab.evaluate import evaluate
from esper_lab.evaluation import (
    BLIND,
    CLAIRVOYANT,
    LADDER_FILE,
    LOOKING,
    NEVER_GROW,
    Rung,
    read_evaluation,
)
from esper_lab.hosts import SPLITS, evaluation_hosts
from esper_lab.ladder_steps import OPPONENTS, budget_text, differences, differences_text, front
from esper_lab.plans import NEVER, library
from small_runs import SMALL as SHORT
from tiny_population import LARGE, evaluation_of, tiny, trained_run

PLANS = NEVER, next(plan for plan in library() if plan.at_once and plan.seeds[0].size > 0.0), LARGE
SMALL = ["--hosts", "4", "--training-hosts", "20", "--threads", "1"]


@pytest.fixture(autouse=True)
def family(scratch_register: None, monkeypatch, tmp_path: Path) -> None:
    add_family(Family("tiny", "tiny", tiny, training=2, held_out=2))
    monkeypatch.setattr(ladder, "library", lambda random=0: PLANS)
    monkeypatch.setattr(baselines, "FACTORS", {})
    monkeypatch.setattr(shipped_controls, "FOLDER", tmp_path / "shipped")
    monkeypatch.setattr(controls, "TRIALS", controls.TRIALS[8::8])
    monkeypatch.setattr(rules, "TREES", 5)
    monkeypatch.chdir(tmp_path)


def test_the_ladder_is_printed_and_written_and_kept(capsys, tmp_path: Path, monkeypatch) -> None:
    for name in ("PATIENCE", "INTERVAL", "POLL"):
        monkeypatch.setattr(progress_lines, name, 0.01)
    arguments = ["--policy", "heuristic", "--suite", "tiny", *SMALL]
    assert esper(["evaluate", *arguments]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^\S.*: \d+ of \d+ episodes, about \d.* remain$", out, re.MULTILINE)
    files = Path("evaluations/tiny-heuristic")
    assert {path.name for path in files.iterdir()} == {LADDER_FILE, "ladder.svg"}
    found = read_evaluation(files / LADDER_FILE)
    assert len(found.tasks) == 4
    for rung in found.rungs:
        # Cells may wrap: 80 columns are few.
        assert rung.name.split()[0] in out
        assert f"{100 * np.mean(rung.utility):.1f}" in out, rung.name
    assert "Never growing is best on" in out
    assert f"wrote {files / LADDER_FILE} and {files / 'ladder.svg'}" in out
    drawing = (files / "ladder.svg").read_text()
    assert drawing.startswith("<svg")
    assert "<style>:root {" in drawing
    stages = Path("evaluations/tiny-stages")
    assert len(list(stages.glob("[!.]*"))) == 8 + len(FINE_TUNING)
    with command.lock_folder(stages, ".lock", ""), pytest.raises(UsageError, match="work: anoth"):
        evaluate(arguments)
    # The controls of another policy are the same, and are not played again.
    monkeypatch.setattr(controls, "play_plans", None)
    assert evaluate(["--policy", "rule", "--suite", "tiny", *SMALL, "--out", "other"]) == 0
    assert read_evaluation(tmp_path / "other" / LADDER_FILE).rungs == found.rungs[:-1]


def test_each_task_has_a_table_of_its_own_in_which_the_policy_stands_out(monkeypatch) -> None:
    rungs = [
        Rung(name, policy, utility, utility, [0.0] * 4)
        for name, policy, utility in (
            ("never grow", False, [0.1, 0.2, 0.3, 0.4]),
            ("mine", True, [0.2, 0.3, 0.6, 0.9]),
        )
    ]
    evaluation = replace_fields(evaluation_of(rungs), tasks=["a", "b", "a", "b"])
    monkeypatch.setattr(command, "sentences", lambda evaluation: [])
    console = Console(file=io.StringIO(), force_terminal=True, width=120, highlight=False)
    command.show(console, evaluation)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    rows = [line for line in lines if "mine" in line and "│" in line]
    assert all("\x1b[1mmine" in row for row in rows)
    assert not any("\x1b[1mnever" in line for line in lines)
    means = [re.findall(r"\d+\.\d", re.sub(r"\x1b\[[0-9;]*m", "", row))[0] for row in rows]
    assert means[:3] == ["50.0", "40.0", "60.0"]


def test_a_suite_of_several_horizons_is_played_in_parts(capsys, monkeypatch) -> None:
    """Four hosts of either horizon, scored as in an evaluation of their own; prices are drawn."""

    def draw(number: int) -> Task:
        length = (12, 8)[number % 2]
        drawn = {"episode_length": length, "price": 0.05 * (1 + number % 4)}
        return replace(tiny(number // 2 % 2), name=f"mixed:{number}", family="mixed", **drawn)

    add_family(Family("mixed", "mixed", draw, training=40, held_out=4))
    totals: dict[str, list[int]] = {}

    class Bars(Progress):
        def add_task(self, description: str, **settings: Any) -> TaskID:
            totals[description] = [settings["total"], 0]
            return TaskID(len(totals) - 1)

        def advance(self, task_id: TaskID, advance: float = 1) -> None:
            totals[list(totals)[task_id]][1] += int(advance)

    monkeypatch.setattr(command, "Progress", Bars)
    sizes = ["--hosts", "8", "--training-hosts", "40", "--threads", "1"]
    assert evaluate(["--policy", "heuristic", "--suite", "mixed", *sizes]) == 0
    found = read_evaluation(Path("evaluations/mixed-heuristic") / LADDER_FILE)
    assert (len(found.tasks), found.training_hosts) == (8, 40)
    assert found.rents == pytest.approx(2 * [0.05, 0.15] + 2 * [0.1, 0.2])
    assert found.front == front(found)
    assert {row.rung for row in found.front} >= {"never grow", "policy, heuristic"}
    assert "by price of parameters" in capsys.readouterr().out
    assert {place[-11:] for place in totals} == {"part 1 of 2", "part 2 of 2"}
    assert [done for _, done in totals.values()] == [total for total, _ in totals.values()]
    stages = Path("evaluations/mixed-stages")
    for column, part in enumerate(evaluation_hosts("mixed", 40, 8, 1)):
        alone = ladder.evaluate("heuristic", "mixed", [part], 1, stages)
        for one, whole in zip(alone.rungs, found.rungs, strict=True):
            assert one.name == whole.name
            assert one.utility == whole.utility[4 * column : 4 * column + 4]


def test_the_split_seed_of_the_command_replaces_the_default_splits(monkeypatch) -> None:
    seeds: list[tuple[int, ...]] = []

    def hosts(*arguments: tuple[int, ...]) -> None:
        seeds.append(arguments[-2])
        raise UsageError("enough")

    monkeypatch.setattr(command, "evaluation_hosts", hosts)
    for more in ([], ["--split-seed", "6"]):
        with pytest.raises(UsageError, match="enough"):
            evaluate(["--policy", "rule", "--suite", "digits", *more])
    assert seeds == [SPLITS, (6,)]


def test_hosts_grow_in_the_slots_of_the_command_or_of_the_run(tmp_path: Path, monkeypatch) -> None:
    place = {"rounds": 1, "telemetry_dir": str(tmp_path), "slots": ("wide",)}
    run = train_ppo_vectorized(**SHORT | place | {"envs": 8, "episode_length": 6}).path
    slots = []

    def played(policy: str, suite: str, parts: list, *arguments: object, **more: object) -> None:
        assert more["controls"] is None
        slots.append({task.host.slot_names for part in parts for task in part.fresh.tasks})
        slots.append({task.host.slot_names for part in parts for task in part.training.tasks})
        raise UsageError("enough")

    monkeypatch.setattr(command, "evaluated", played)
    for flags in ([], ["--slots", "r0c0"]):
        with pytest.raises(UsageError, match="enough"):
            evaluate(["--policy", str(run), "--suite", "digits_shift", *flags])
    wide = {("wide0", "wide1")}
    assert slots == [wide, wide, {("r0c0",)}, {("r0c0",)}]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--policy nowhere", "policy: 'nowhere' is neither one of"),
        ("--policy rule --suite tin", "task: there is no task 'tin'; did you mean 'tiny'"),
        ("--policy rule --hosts 3", "hosts: must lie between 4 and"),
        ("--policy rule --training-hosts x", "--training-hosts: must be a whole number"),
        ("--policy rule --out file", "out: .*file is not a directory; name another"),
        ("--policy rule --out file/x", "out: .*file is not a directory; name another"),
        ("--policy rule --work file", "work: .*file is not a directory; name another"),
        ("--policy rule --work /proc/x", "work: /proc cannot be written .*; name another"),
        ("--policy rule --out /proc/x", "out: /proc cannot be written .*; name another"),
        ("--policy keep-or-moove", "policy: 'keep-or-moove' is .*; did you mean 'keep-or-move'"),
        ("--policy rule --plugin nowhere.py", "plugin: cannot read 'nowhere.py'"),
        ("", "policy"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(words: str, says: str, capsys) -> None:
    arguments = words.split()
    Path("file").write_text("")
    suite = [] if "--suite" in arguments else ["--suite", "tiny"]
    sizes = [] if {"--hosts", "--training-hosts"} & {*arguments} else SMALL
    assert run_guarded(evaluate, [*arguments, *suite, *sizes]) == 2
    output = capsys.readouterr()
    assert output.out.strip() == ""
    assert len(output.err.strip().splitlines()) == 1
    assert re.search(says, output.err)
    assert [path.name for path in Path().iterdir()] == ["file"]


def shipped(hosts: int = 6, played: bool = False) -> None:
    """Ship the controls of ``hosts`` hosts, or made-up numbers unless ``played``."""
    (place,), values = evaluation_hosts("tiny", 20, hosts, 1), [0.5] * hosts
    names = NEVER_GROW, BLIND[0], LOOKING[0], CLAIRVOYANT
    rungs = [Rung(name, False, values, values, values, [0] * hosts) for name in names]
    if played:
        rungs = ladder.evaluate("rule", "tiny", [place], 1, Path("stages")).rungs
    identity = controls.controls_identity(place, PLANS)
    made = shipped_controls.ShippedControls(identity, "made here", 20, hosts, rungs)
    assert shipped_controls.write_shipped("tiny", made).parent == Path("shipped").absolute()


def test_shipped_controls_are_not_played(capsys, monkeypatch) -> None:
    shipped(played=True)
    with monkeypatch.context() as patch:
        patch.setattr(controls, "play_plans", None)
        assert evaluate(["--policy", "never", "--suite", "tiny", *SMALL]) == 0
    out = capsys.readouterr().out
    origin = "made here; never growing differs here by +0.0 points"
    assert f"The controls ship with Esper ({origin}); --fresh plays them anew." in out
    found = read_evaluation(Path("evaluations/tiny-never") / LADDER_FILE)
    assert (found.shipped, len(found.tasks)) == (origin, 4)
    assert evaluate(["--policy", "never", "--suite", "tiny", *SMALL, "--fresh", "--out", "x"]) == 0
    assert "ship" not in capsys.readouterr().out
    played = read_evaluation(Path("x") / LADDER_FILE)
    assert played.shipped is None
    for one, other in zip(found.rungs, played.rungs, strict=True):
        assert (one.name, one.chosen) == (other.name, other.chosen)
        for column in ("utility", "validation", "added", "score"):
            assert getattr(one, column) == pytest.approx(getattr(other, column), abs=1e-5)


def test_shipped_controls_of_something_else_are_not_used(monkeypatch) -> None:
    def why_not(training: int = 20, fresh: int = 4, slots: tuple[str, ...] = ()) -> str:
        usable, line = ladder.usable_controls("tiny", training, fresh, slots=slots)
        assert usable is None
        return line or "there are none"

    assert why_not() == "there are none"
    shipped(4)
    usable, line = ladder.usable_controls("tiny", 20, 4)
    assert (usable.origin, line) == ("made here", None)
    start = "The controls are played here, because those that ship with Esper "
    assert why_not(training=21) == start + "were tuned on 20 hosts."
    assert why_not(fresh=5) == start + "are of 4 hosts."
    assert why_not(slots=("wide",)) == start + "grow in the slots of the tasks."
    for module, name, value in (
        (ladder, "library", lambda: PLANS[:2]),
        (rules, "TREES", 6),
        (play, "RESULTS_VERSION", play.RESULTS_VERSION + 1),
        (baselines, "FACTORS", {"full tuning": (1.0, 2.0)}),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            assert why_not() == start + "are of other tasks, plans or rules."
    Path("shipped/tiny.json.gz").write_bytes(b"damaged")
    assert run_guarded(evaluate, ["--policy", "rule", "--suite", "tiny", *SMALL]) == 2


def test_the_report_of_a_run_shows_its_evaluations(capsys, tmp_path: Path) -> None:
    shipped()
    run = trained_run(tmp_path / "runs", rounds=1)
    arguments = ["--policy", str(run), "--suite", "tiny", *SMALL, "--members", "1"]
    assert evaluate(arguments) == 0
    out = capsys.readouterr().out
    assert f"and {run / 'ladders' / 'tiny.json'}" in out
    found = read_evaluation(run / "ladders" / "tiny.json")
    assert found.rule_episodes == 20 * (len(PLANS) + 2 * len(controls.TRIALS))
    assert found.policy_episodes == 4
    assert found.differences == differences(found)
    assert {(one.policy, one.kind) for one in found.differences} == {
        (f"policy, {way}", kind) for way in ("greedy", "sampled") for kind in OPPONENTS
    } - {(f"policy, {way}", "training") for way in ("greedy", "sampled")}
    for words in (differences_text(found), budget_text(found)):
        assert words in out
    text = write_report([run], tmp_path / "report.html").read_text()
    for words in (f"{run.name} on tiny", "policy, greedy", "yoked copy, sampled", "made here"):
        assert words in text
    (run / "ladders" / "tiny.json").unlink()
    (run / "ladders").rmdir()
    (run / "ladders").write_text("")
    assert evaluate(arguments) == 0
    assert "will not show it: cannot write" in capsys.readouterr().out
