"""The two header lines: the run, its progress and speed, and whether data still arrive."""

from dataclasses import dataclass
from statistics import fmean

from rich.text import Text

from esper.karn.sanctum.formatting import duration, gauge, number_text
from esper.karn.sanctum.log import EventLog
from esper.karn.sanctum.palette import Palette
from esper.karn.sanctum.snapshot import Moment, Playhead
from esper.karn.sanctum.widgets import WIDE, Lines
from esper.leyline.metrics import Metric
from esper.leyline.precision_text import precision_text

QUIET_SECONDS = 10.0
"""Seconds without new data after which Sanctum reports the silence; more for a slow run."""
_QUIET_STEPS = 5.0
_RECENT = 5


@dataclass(frozen=True, slots=True)
class Standing:
    """State of the viewer that the header shows besides the run.

    Attributes:
        log: the run's events.
        playhead: position of the moment that is shown.
        silence: seconds since data last arrived.
        alive: whether the run's process is alive; None if not checked.
        at_end: whether the file has been read to its end.
    """

    log: EventLog
    playhead: Playhead
    silence: float
    alive: bool | None
    at_end: bool


class Header(Lines):
    """The two header lines."""

    def describe(self, name: str, moment: Moment, standing: Standing, palette: Palette) -> None:
        """Show a moment."""
        text = _identity(name, moment, palette)
        text.append("\n").append_text(status(moment, standing, palette)).append("  ")
        text.append_text(_progress(moment, palette, self.size.width))
        self.show(text)


def _identity(name: str, moment: Moment, palette: Palette) -> Text:
    text = Text("SANCTUM ", style=palette.accent, no_wrap=True, overflow="ellipsis")
    text.append(name, style="bold")
    start = moment.start
    if start is None:
        return text
    tasks = " ".join(start.tasks)
    latest = moment.snapshots[-1] if moment.snapshots else start
    precision = precision_text(
        latest.amp_dtype, latest.amp_policy_dtype, is_mixed=latest.amp_enabled
    )
    text.append(
        f"  {tasks} · {start.policy} · {start.device} {precision} · {start.envs} envs",
        style=palette.muted,
    )
    return text


def _progress(moment: Moment, palette: Palette, width: int) -> Text:
    start, step = moment.start, moment.step
    if start is None:
        return Text("waiting for the run's first event", style=palette.muted)
    done = moment.outcomes[-1].round if moment.outcomes else start.round
    within = 0.0
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(f"round {min(moment.round or 1, start.rounds)}/{start.rounds}")
    if step is not None:
        text.append(f" step {step.step}/{start.episode_length}")
        within = step.step / start.episode_length if step.round > done else 0.0
    share = (done + within) / max(1, start.rounds)
    wide = width >= WIDE - 10
    if wide:
        text.append(" ").append(gauge(share, 24), style=palette.accent)
    text.append(f" {100 * share:.0f} %")
    if moment.outcomes:
        last = moment.outcomes[-1]
        name = "gain" if last.gain else "on val."
        text.append(f"  round {last.round}: {name} ")
        text.append(number_text(fmean(last.gain or last.validation_gain), "+.1f"))
    remaining = seconds_left(moment)
    if remaining is not None and moment.finished is None and remaining > 0:
        text.append(f"  {duration(remaining)} left")
    if moment.snapshots:
        speed = moment.snapshots[-1].environment_steps_per_second
        text.append(f"  {number_text(speed, ',.0f')} steps/s")
    rate = learning_rate(moment)
    # The page of the policy shows it as well.
    if rate is not None and wide:
        text.append(f"  LR {rate}")
    return text


def learning_rate(moment: Moment) -> str | None:
    """Return the learning rate of the last update as text; None where none was recorded."""
    metrics = moment.updates[-1].metrics if moment.updates else {}
    if Metric.LEARNING_RATE in metrics:
        return number_text(metrics[Metric.LEARNING_RATE], ".3g")
    if moment.snapshots and moment.snapshots[-1].learning_rate is not None:
        return number_text(moment.snapshots[-1].learning_rate, ".3g")
    return None


def seconds_left(moment: Moment) -> float | None:
    """Estimate the seconds to the end of the run from its last rounds; None before the first."""
    start, snapshots = moment.start, moment.snapshots[-_RECENT:]
    if start is None or not snapshots:
        return None
    pace = fmean(float(s.rollout_seconds) + float(s.update_seconds) for s in snapshots)
    return pace * (start.rounds - snapshots[-1].round)


def status(moment: Moment, standing: Standing, palette: Palette) -> Text:
    """Return the status: reading, paused, replay, ended, silent or live."""
    playhead = standing.playhead
    if not standing.at_end:
        share = standing.log.index.length / max(1, standing.log.size)
        return Text(f"reading, {100 * share:.0f} %", style=palette.warning)
    if not playhead.live:
        if not playhead.playing:
            return Text("⏸ paused", style=palette.warning)
        words = f"▶ replay at {playhead.steps_per_second} steps/s"
        return Text(words, style=palette.warning)
    if moment.finished is not None:
        glyph = "■" if moment.finished.status == "finished" else "▲"
        style = palette.good if moment.finished.status == "finished" else palette.warning
        return Text(f"{glyph} {moment.finished.status}", style=style)
    if standing.silence > quiet_after(moment):
        why = {None: "", True: ", but its process is alive", False: "; its process has ended"}
        words = f"▲ no new data for {duration(standing.silence)}{why[standing.alive]}"
        return Text(words, style=palette.bad)
    return Text("● live", style=palette.good)


def quiet_after(moment: Moment) -> float:
    """Return after how many seconds silence is reported: the time of several steps or updates."""
    if not moment.snapshots or moment.start is None:
        return QUIET_SECONDS
    last = moment.snapshots[-1]
    rollout, update = float(last.rollout_seconds), float(last.update_seconds)
    step = rollout / max(1, moment.start.episode_length)
    interval = max(step, update) if moment.steps else rollout + update
    return max(QUIET_SECONDS, _QUIET_STEPS * interval)
