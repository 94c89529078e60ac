"""What all views have in common."""

from textual.containers import Vertical

from esper.karn.sanctum.moment import Moment
from esper.karn.sanctum.palette import Palette


class View(Vertical):
    """One of Sanctum's pages. It is shown moments; it keeps nothing of a run itself."""

    title = ""

    def show(self, moment: Moment, palette: Palette) -> None:
        """Draw a moment."""
        raise NotImplementedError
