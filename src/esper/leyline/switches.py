"""Environment variables that switch something on."""

import os


def switched_on(variable: str) -> bool:
    """Whether the environment variable is set, to something else than nothing or 0."""
    return os.environ.get(variable, "0") not in ("", "0")
