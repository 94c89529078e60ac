"""The one exception that means: the input is at fault, and here is how to mend it."""

from collections.abc import Callable, Iterable
from difflib import get_close_matches


class UsageError(ValueError):
    """A mistake the user can fix. Its text is one line that names the field and the fix.

    The command line prints the text without a traceback and exits with status 2.
    """


def suggestion(
    word: str,
    known: Iterable[str],
    otherwise: str,
    *,
    show: Callable[[str], str] = repr,
    cutoff: float = 0.6,
) -> str:
    """What was probably meant by ``word``, or what to do where nothing known is near it.

    Args:
        word: what is not known.
        known: what is.
        otherwise: the advice where nothing is near.
        show: how one of the known is written.
        cutoff: similarity from which one is near, in [0, 1]; see ``difflib``.
    """
    near = get_close_matches(word, list(known), 1, cutoff)
    return f"did you mean {show(near[0])}?" if near else otherwise
