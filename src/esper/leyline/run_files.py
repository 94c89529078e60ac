"""Names of the files in a run directory that both its writer and its readers know."""

import re

_ROUND = re.compile("[0-9]{6,18}")


def is_round(name: str) -> bool:
    """Whether a folder under ``checkpoints`` has the name of a round's checkpoint."""
    return _ROUND.fullmatch(name) is not None


LADDERS = "ladders"
"""Folder with the evaluations of its policy, one file per suite."""
