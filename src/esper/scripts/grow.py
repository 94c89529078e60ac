"""``esper grow``: grow one network with a policy, and export it to files that run without Esper."""

from dataclasses import replace

from esper.scripts.flags import parse
from esper.scripts.grow_arguments import GrowArguments, check_kind
from esper.scripts.grow_model import grow_model
from esper.scripts.grow_task import grow_task
from esper.scripts.output import outlive_output
from esper.simic.tools.grow import DEFAULT

PROGRAM = "esper grow"


def grow(arguments: list[str]) -> int:
    """Grow one network with a policy and export it."""
    given = parse(GrowArguments, PROGRAM, arguments)
    outlive_output()
    check_kind(given)
    if given.task is not None:
        return grow_task(given)
    return grow_model(replace(given, policy=given.policy or DEFAULT))
