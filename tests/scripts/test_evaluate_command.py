"""``esper evaluate``: the table, the files, and bad input in one line."""

import re
from pathlib import Path

import numpy as np
import pytest

from esper.leyline.errors import UsageError
from esper.leyline.evaluation import LADDER_FILE, read_evaluation
from esper.runtime.tasks import Family, add_family
from esper.scripts import evaluate as command
from esper.scripts.entry import guarded
from esper.scripts.evaluate import evaluate
from esper.simic.evaluation import ladder, rules
from esper.simic.evaluation.plans import NEVER, library
from esper.simic.training.vectorized import train_ppo_vectorized
from tiny_population import LARGE, tiny

PLANS = NEVER, next(plan for plan in library() if plan.at_once), LARGE
SMALL = ["--hosts", "4", "--training-hosts", "20", "--threads", "1"]


@pytest.fixture(autouse=True)
def family(scratch_register: None, monkeypatch, tmp_path: Path) -> None:
    add_family(Family("tiny", "tiny", tiny, training=2, held_out=2))
    monkeypatch.setattr(ladder, "library", lambda random: PLANS)
    monkeypatch.setattr(rules, "TREES", 5)
    monkeypatch.chdir(tmp_path)


def test_the_ladder_is_printed_and_written_and_kept(capsys, tmp_path: Path, monkeypatch) -> None:
    arguments = ["--policy", "heuristic", "--suite", "tiny", *SMALL]
    assert evaluate(arguments) == 0
    out = capsys.readouterr().out
    files = Path("evaluations/tiny-heuristic")
    assert {path.name for path in files.iterdir()} == {LADDER_FILE, "ladder.svg"}
    found = read_evaluation(files / LADDER_FILE)
    assert len(found.tasks) == 4
    for rung in found.rungs:
        mean = 100 * np.mean(rung.utility)
        # Cells may wrap: 80 columns are few.
        assert rung.name.split()[0] in out
        assert f"{mean:.1f}" in out, rung.name
    assert "Never growing is best on" in out
    assert f"wrote {files / LADDER_FILE} and {files / 'ladder.svg'}" in out
    assert (files / "ladder.svg").read_text().startswith("<svg")
    assert len(list(Path("evaluations/tiny-stages").iterdir())) == 5
    # The controls of another policy are the same, and are not played again.
    monkeypatch.setattr(ladder, "play_plans", None)
    assert evaluate(["--policy", "rule", "--suite", "tiny", *SMALL, "--out", "other"]) == 0
    assert read_evaluation(tmp_path / "other" / LADDER_FILE).rungs == found.rungs[:-1]


def test_the_split_seed_is_that_of_the_command_or_of_the_run(monkeypatch, tmp_path: Path) -> None:
    seeds: list[int] = []

    def hosts(*arguments: int) -> None:
        seeds.append(arguments[-1])
        raise UsageError("enough")

    monkeypatch.setattr(command, "evaluation_hosts", hosts)
    sizes = {"envs": 2, "group_size": 1, "episode_length": 2, "max_batches": 1, "minibatches": 1}
    run = train_ppo_vectorized(
        rounds=1, split_seed=5, telemetry_dir=str(tmp_path), lstm_hidden=8, **sizes
    ).path
    for policy, more in (("rule", []), (run, []), (run, ["--split-seed", "6"])):
        with pytest.raises(UsageError, match="enough"):
            evaluate(["--policy", str(policy), "--suite", "digits", *more])
    assert seeds == [0, 5, 6]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--policy", "nowhere"], "policy: nowhere is not a run directory or one of"),
        (
            ["--policy", "rule", "--suite", "tin"],
            "task: there is no task 'tin'; did you mean 'tiny'",
        ),
        (["--policy", "rule", "--suite", "held_out"], "suite: the tasks of held_out differ"),
        (["--policy", "rule", "--hosts", "3"], "hosts: must lie between 4 and"),
        (["--policy", "rule", "--training-hosts", "x"], "--training-hosts: must be a whole number"),
        (["--policy", "rule", "--out", "file"], "out: .*file is not a directory; name another"),
        (["--policy", "rule", "--out", "file/x"], "out: .*file is not a directory; name another"),
        (["--policy", "rule", "--work", "file"], "work: .*file is not a directory; name another"),
        (["--policy", "rule", "--plugin", "nowhere.py"], "plugin: cannot read 'nowhere.py'"),
        ([], "policy"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(arguments, says: str, capsys) -> None:
    Path("file").write_text("")
    suite = [] if "--suite" in arguments else ["--suite", "tiny"]
    sizes = [] if {"--hosts", "--training-hosts"} & {*arguments} else SMALL
    assert guarded(evaluate, [*arguments, *suite, *sizes]) == 2
    output = capsys.readouterr()
    assert output.out.strip() == ""
    assert len(output.err.strip().splitlines()) == 1
    assert re.search(says, output.err)
    assert [path.name for path in Path().iterdir()] == ["file"]
