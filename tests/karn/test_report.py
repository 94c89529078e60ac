"""The report of a run is one whole file that needs nothing else."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from esper.karn.report import write_report
from esper.leyline.errors import UsageError
from esper.leyline.events import (
    AnalyticsSnapshot,
    EpisodeOutcome,
    Event,
    PPOUpdateCompleted,
    TrainingStarted,
    encode,
)


def recorded(run: Path, rounds: int, updates: bool = True) -> Path:
    """A run directory as a process would leave it."""
    run.mkdir()
    (run / "config.json").write_text('{"settings": {"task": "a<b"}}')
    events: list[Event] = [
        TrainingStarted(
            time=0, schema=1, round=0, rounds=rounds, tasks=["a<b"], policy="ppo", envs=2,
            group_size=2, episode_length=4, slots=[["r0c0"]], host_parameters=[10],
            device="cpu", amp_enabled=False,
        )
    ]  # fmt: skip
    for number in range(1, rounds + 1):
        events.append(
            EpisodeOutcome(
                time=0, round=number, task=["a<b"] * 2, utility=[0.1, 0.2], twin_utility=[0.1, 0.1],
                rolled_back=[0, 1], accuracy=[0.1 * number, 0.3], twin_accuracy=[0.1, "NaN"],
                expected_accuracy=[0, 0], twin_expected_accuracy=[0, 0], episode_return=[1, 2],
                added_parameters=[0, 4], germinated=[1, 0], fossilised=[0, 1], pruned=[0, 0],
            )
        )  # fmt: skip
        events.append(
            AnalyticsSnapshot(
                time=0, round=number, amp_enabled=False, amp_dtype=None, learning_rate=1e-3,
                environment_steps_per_second=7.0, rollout_seconds=1, update_seconds=1,
            )
        )  # fmt: skip
        metrics = {"explained_variance_within_step": 0.5, "entropy": 1.0, "value_loss": "Infinity"}
        if updates:
            events.append(PPOUpdateCompleted(time=0, round=number, update=number, metrics=metrics))
    (run / "events.jsonl").write_bytes(b"".join(encode(e) + b"\n" for e in events))
    return run


@pytest.mark.parametrize(("updates", "plots"), [(True, 3), (False, 2)])
def test_a_report_is_one_file_with_a_curve_in_every_plot(
    tmp_path: Path, updates: bool, plots: int
) -> None:
    text = write_report(recorded(tmp_path / "run", 3, updates)).read_text()
    assert "a&lt;b: ppo" in text
    assert "a<b" not in text
    assert not re.search(r"<script|<link|src=|@import", text)
    pictures = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(pictures) == plots
    for picture in pictures:
        root = ElementTree.fromstring(picture)
        lines = [e for e in root.iter() if e.get("id", "").startswith("line2d")]
        drawn = [p.get("d", "") for line in lines for p in line.iter() if p.tag.endswith("path")]
        assert sum(d.count("L") >= 2 for d in drawn) >= 1, "no curve through three rounds"


def test_the_same_run_gives_the_same_report(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", 2)
    assert write_report(run).read_bytes() == write_report(run).read_bytes()


def test_a_run_without_a_finished_round_has_nothing_to_report(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no finished round"):
        write_report(recorded(tmp_path / "run", 0))
