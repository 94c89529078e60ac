"""The exception for a run whose files do not serve what the user asked for."""

from esper.leyline.errors import UsageError


class UnusableRun(UsageError):
    """A run that cannot be read or restored. Its text is that for a run to be resumed.

    Args:
        reason: what is wrong, without a field: a run is also named by other settings, which put
            their own name before the reason.
        fix: what to do if the run was to be resumed.
    """

    def __init__(self, reason: str, fix: str = ""):
        super().__init__(reason, fix)
        self.reason, self.fix = reason, fix

    def __str__(self) -> str:
        return f"resume: {self.reason}" + (f"; {self.fix}" if self.fix else "")
