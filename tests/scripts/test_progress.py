"""The progress display of a run at the widths of real terminals."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from esper.leyline.config import unflatten
from esper.scripts.progress import LiveProgress, print_summary
from esper.simic.training.vectorized import run_training

SETTINGS = {"envs": 4, "group_size": 2, "episode_length": 4, "max_batches": 1, "batch_size": 8}


def shown(tmp_path: Path, terminal: bool, width: int) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=width)
    config = unflatten({**SETTINGS, "rounds": 2, "telemetry_dir": str(tmp_path)})
    with LiveProgress(console) as progress:
        summary = run_training(config, "ppo", observer=progress)
        if terminal:
            console.print(progress.progress.get_renderable())
    print_summary(console, summary)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 160])
def test_the_live_line_shows_all_fields_at_any_width(tmp_path: Path, width: int) -> None:
    text = shown(tmp_path, terminal=True, width=width)
    (last,) = [line for line in text.splitlines() if "round 2/2" in line][-1:]
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", last)
    for wanted in ("steps/s", "val. acc", "twin", "entropy", "lr 0.001", "0:00:00"):
        assert wanted in plain, wanted
    assert "…" not in plain


def test_without_a_terminal_every_round_is_one_line(tmp_path: Path) -> None:
    lines = shown(tmp_path, terminal=False, width=80).splitlines()
    rounds = [line for line in lines if line.startswith("round ")]
    assert [line.split()[1] for line in rounds] == ["1/2", "2/2"]
    assert all("gain" in line and "validation difference" in line for line in rounds)
    assert all("entropy" in line and "lr" in line for line in rounds)


def test_the_final_table_has_the_key_figures(tmp_path: Path) -> None:
    text = shown(tmp_path, terminal=False, width=80)
    for wanted in (
        "gain, points",
        "validation difference, points",
        "test accuracy grown",
        "validation accuracy of the twin",
        "parameters added",
        "seeds germinated",
        "seeds fossilised",
        "seeds pruned",
        "environment steps per second",
        "finished after",
        f"run directory: {tmp_path}",
    ):
        assert wanted in text, wanted
