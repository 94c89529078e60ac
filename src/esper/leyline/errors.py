"""The exception for mistakes in the input, whose message says how to fix them."""

from collections.abc import Callable, Iterable
from difflib import get_close_matches


class UsageError(ValueError):
    """A mistake that the user can fix. Its text is one line that names the field and the fix.

    The command line prints the text without a traceback and exits with status 2.
    """


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its class if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def suggestion(
    word: str,
    words: Iterable[str],
    otherwise: str,
    *,
    show: Callable[[str], str] = repr,
    cutoff: float = 0.6,
) -> str:
    """A question that suggests the known word most similar to ``word``, else ``otherwise``.

    Args:
        word: the unknown word.
        words: the words to compare it with.
        otherwise: the advice if no known word is similar.
        show: formats the suggested word.
        cutoff: minimum similarity of a suggestion, in [0, 1]; see ``difflib``.
    """
    near = get_close_matches(word, list(words), 1, cutoff)
    return f"did you mean {show(near[0])}?" if near else otherwise
