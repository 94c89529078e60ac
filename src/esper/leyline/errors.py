"""The one exception that means: the input is at fault, and here is how to mend it."""


class UsageError(ValueError):
    """A mistake the user can fix. Its text is one line that names the field and the fix.

    The command line prints the text without a traceback and exits with status 2.
    """
