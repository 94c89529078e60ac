"""``esper grow``: grow one network with a policy, and export it to files that run without Esper."""

from esper.scripts.flags import parse
from esper.scripts.grow_arguments import GrowArguments, check_kind
from esper.scripts.grow_model import grow_model
from esper.scripts.grow_task import grow_task
from esper.scripts.output import outlive_output

PROGRAM = "esper grow"


def grow(arguments: list[str]) -> int:
    """Grow one network with a policy and export it."""
    settings = parse(GrowArguments, PROGRAM, arguments)
    outlive_output()
    check_kind(settings)
    return grow_model(settings) if settings.task is None else grow_task(settings)
