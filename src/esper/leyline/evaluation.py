"""The file of an evaluation: a policy between controls, on the same fresh hosts."""

from pathlib import Path

import msgspec

from esper.leyline.errors import UsageError

SCHEMA = 1
LADDER_FILE = "ladder.json"


class Rung(msgspec.Struct, frozen=True):
    """A control or policy on H hosts.

    Attributes:
        name: what it is.
        policy: whether it is the policy that is evaluated, and not a control.
        utility: test utility per host, ``[H]``: expected accuracy on the test split minus rent.
        validation: the same with the validation split.
        added: parameters added per host.
        chosen: for a control that chooses one plan per host, its index in ``plans``, ``[H]``.
    """

    name: str
    policy: bool
    utility: list[float]
    validation: list[float]
    added: list[float]
    chosen: list[int] | None = None


class Evaluation(msgspec.Struct, frozen=True):
    """A ladder.

    Attributes:
        policy: the policy as the user named it.
        suite: suite that the hosts were drawn from.
        training_hosts: number of hosts on which the rules were tuned.
        tasks: task or family of each host, ``[H]``.
        plans: names of the plans that the rules choose from.
        rungs: the controls from the bottom up, then the policy; the first never grows.
        split_seed: seed of the data's splits; None if none of them is drawn.
    """

    policy: str
    suite: str
    training_hosts: int
    tasks: list[str]
    plans: list[str]
    rungs: list[Rung]
    schema: int = SCHEMA
    split_seed: int | None = None


def read_evaluation(path: Path) -> Evaluation:
    """Read the file of an evaluation.

    Raises:
        UsageError: it cannot be read, or has another format.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Evaluation)
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(f"evaluation: cannot read {path} ({error}); evaluate again") from error
    if found.schema != SCHEMA:
        raise UsageError(
            f"evaluation: {path} has schema {found.schema}, not {SCHEMA}; evaluate again"
        )
    return found
