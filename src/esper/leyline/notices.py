"""One-line messages on stderr: safe to print anywhere, and never the end of what is under way."""

import sys
from contextlib import suppress

LONGEST_MESSAGE = 400
"""Maximum printed characters of a message; it may quote user input that is longer."""


def notice(text: str) -> None:
    """Print a message on stderr; if stderr cannot be written, the message is lost."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            print(one_line(text), file=sys.stderr)


def one_line(text: str) -> str:
    """Escape the control characters of a message; remove the middle of a long message."""
    if len(text) > LONGEST_MESSAGE:
        text = f"{text[: LONGEST_MESSAGE // 2]} [...] {text[-LONGEST_MESSAGE // 2 :]}"
    return escape(text)


def escape(text: str) -> str:
    """The text with control characters, line ends and unpaired surrogates written as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
