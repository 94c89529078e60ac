"""How many examples Hypothesis tries: few and always the same ones, or many and new ones."""

import os

from hypothesis import settings

LONG = os.environ.get("ESPER_HYPOTHESIS") == "long"
"""Whether the long profile is on: ``ESPER_HYPOTHESIS=long``."""

FACTOR = 50
"""Times as many examples in the long profile."""


def examples(count: int) -> int:
    """The number of examples of a test that tries ``count`` by default."""
    return count * FACTOR if LONG else count


def load_profile() -> None:
    """Load the profile of the environment; no test has a deadline, because machines are busy."""
    settings.register_profile("ci", deadline=None, derandomize=True, database=None)
    settings.register_profile("long", deadline=None, max_examples=examples(100), print_blob=True)
    settings.load_profile("long" if LONG else "ci")
