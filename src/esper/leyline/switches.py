"""Environment variables that switch a feature off."""

import os


def switched_on(variable: str) -> bool:
    """Whether the environment variable is set to anything but an empty string or 0."""
    return os.environ.get(variable, "0") not in ("", "0")
