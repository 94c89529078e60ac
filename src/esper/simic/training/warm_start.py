"""Learning that starts from the policy of another run."""

import os
from pathlib import Path

from esper.leyline.config import TrainConfig
from esper.leyline.errors import UsageError
from esper.runtime.paths import absolute_path
from esper.simic.run.checkpoint import Checkpoint, load_latest
from esper.simic.run.run_directory import stored_config
from esper.simic.run.unusable_run import UnusableRun
from esper.tamiyo.policy_box import learned_path


def initial_run(name: str) -> str:
    """Run directory of the initial policy: one in the box by its name, else the path of a run."""
    box_path = learned_path(name)
    if box_path is not None:
        return os.path.realpath(box_path)
    try:
        return absolute_path(name)
    except ValueError:  # a null byte: no path, which initial_checkpoint refuses
        return name


def initial_checkpoint(config: TrainConfig) -> Checkpoint | None:
    """The checkpoint of the policy that learning starts from; None for random weights.

    Raises:
        UsageError: the run has no usable checkpoint, or its network is another.
    """
    if config.learner.initial_policy is None:
        return None
    run = Path(initial_run(config.learner.initial_policy))
    try:
        is_run = (run / "config.json").is_file()
    except (OSError, ValueError):
        is_run = False
    if not is_run:
        raise UsageError(
            f"initial_policy: {config.learner.initial_policy} is not a run directory; esper runs "
            "lists your runs, and esper policies the policies that come with Esper"
        )
    try:
        settings, _ = stored_config(run)
        if settings.gymnasium.gym is not None:
            raise UsageError(
                f"initial_policy: {run} was trained on {settings.gymnasium.gym}; give a growth run"
            )
        width, expectation = settings.learner.lstm_hidden, config.learner.lstm_hidden
        if width != expectation:
            raise UsageError(
                f"initial_policy: the LSTM of {run} has width {width}, not {expectation}; give "
                f"--lstm-hidden {width}"
            )
        return load_latest(run)
    except UnusableRun as error:
        raise UsageError(f"initial_policy: {error.reason}") from error
