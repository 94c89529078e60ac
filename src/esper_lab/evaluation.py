"""The file of an evaluation: a policy between controls, on the same fresh hosts."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean

import msgspec

from esper.kasmina.width_prior import FACTORS
from esper.leyline.disk import DamagedFile, read_sealed_json, sealed_json
from esper.leyline.errors import UsageError

SCHEMA = 1
LADDER_FILE = "ladder.json"
CAPACITY = "capacity"
"""The suite of networks whose width is chosen, see ``esper_lab.capacity``."""

NEVER_GROW = "never grow"
EVERYTHING = "everything at step 0"
BEST_FIXED, LOOKUP = "best fixed schedule", "lookup on static features"
ONE_LOOK, TRIGGER, TREE, FOREST = "one look", "trigger", "tree", "forest"
STOPPING, TRY_AND_KEEP = "optimal stopping", "try and keep"
TUNED_TWIN = "never grow, tuned"
STATIC_NETWORK = "static network of three times the size"
STATIC_LOOKUP = "static network, size by lookup"
STATIC_SIZES = tuple(f"static network, {factor:g} times as wide" for factor in FACTORS)
SHORT_SWEEP, SWEEP = "five sizes, a fifth of a training each", "five sizes, five trainings"
FULL_TUNING, LAST_LAYER_TUNING, AUTO_RGN = "full tuning", "last-layer tuning", "Auto-RGN"
NORM_TUNING = "norm and last-layer tuning"
RANK_1_TUNING, RANK_4_TUNING = "rank-1 tuning (LoRA)", "rank-4 tuning (LoRA)"
COPY_SUFFIX, COPY_CHOICE = " of a copy", "best copy or none"
BLIND = BEST_FIXED, LOOKUP
"""Rungs that choose a plan without a look at the host."""
LOOKING = ONE_LOOK, TRIGGER, TREE, FOREST, STOPPING, TRY_AND_KEEP
"""Rungs that look at the host."""
RULES = NEVER_GROW, EVERYTHING, *BLIND, *LOOKING
"""Rungs that a user could follow instead of a policy; others know the outcomes of their hosts."""
CLAIRVOYANT = "clairvoyant per host"
WITHOUT_GROWING = (
    TUNED_TWIN, STATIC_NETWORK, STATIC_LOOKUP, *STATIC_SIZES, SHORT_SWEEP, SWEEP, FULL_TUNING,
    LAST_LAYER_TUNING, NORM_TUNING, RANK_1_TUNING, RANK_4_TUNING, AUTO_RGN, COPY_CHOICE,
)  # fmt: skip
"""Rungs that spend the budget of a host on another network or another training instead."""


class Rung(msgspec.Struct, frozen=True):
    """A control or policy on H hosts.

    Attributes:
        name: what it is.
        policy: whether it is the policy that is evaluated, and not a control.
        utility: test utility per host, ``[H]``: expected accuracy on the test split minus prices.
        validation: the same with the validation split.
        added: parameters added per host.
        chosen: for a control that chooses one plan per host, its index in ``plans``, ``[H]``.
        score: expected accuracy on the test split per host; None if it was not recorded.
        operations: of training per host, trials and all networks of a sweep included; None as
            above.
    """

    name: str
    policy: bool
    utility: list[float]
    validation: list[float]
    added: list[float]
    chosen: list[int] | None = None
    score: list[float] | None = None
    operations: list[float] | None = None


COLUMNS = "utility", "validation", "added", "chosen", "score", "operations"
"""What a rung has of each host."""


def best_rung(rungs: Iterable[Rung], names: Sequence[str]) -> Rung | None:
    """Of the rungs with these names the one of the highest mean utility; None if there is none.

    As an opponent it is chosen on the hosts on which it is scored, to its advantage.
    """
    matches = (rung for rung in rungs if rung.name in names)
    return max(matches, key=lambda rung: fmean(rung.utility), default=None)


class Difference(msgspec.Struct, frozen=True):
    """Test utility of a policy minus that of an opponent, paired by host, in percentage points.

    Attributes:
        policy: name of the policy's rung.
        kind: what the opponent is, see ``ladder_steps.OPPONENTS``.
        opponent: name of the opponent's rung.
        mean: mean difference.
        low, high: ends of its 95 % interval.
        verdict: on which side of zero the interval lies, see ``ladder_steps.verdict``.
    """

    policy: str
    kind: str
    opponent: str
    mean: float
    low: float
    high: float
    verdict: str


class PricedRung(msgspec.Struct, frozen=True):
    """A rung on the hosts of one third of the prices; means with the ends of 95 % intervals.

    Attributes:
        rung: its name.
        prices: least and greatest price of these hosts.
        hosts: number of these hosts.
        added: parameters added.
        score: expected accuracy on the test split, in percent.
        utility: test utility, in percentage points.
    """

    rung: str
    prices: tuple[float, float]
    hosts: int
    added: tuple[float, float, float]
    score: tuple[float, float, float]
    utility: tuple[float, float, float]


class Evaluation(msgspec.Struct, frozen=True):
    """A ladder.

    Attributes:
        policy: the policy as the user named it.
        suite: suite that the hosts were drawn from.
        training_hosts: number of hosts on which the rules were tuned.
        tasks: task or family of each host, ``[H]``.
        plans: names of the plans that the rules choose from.
        rungs: the controls from the bottom up, then the policy; the first never grows.
        splits: seed of the split of each host's data, ``[H]``; None where no split is drawn.
        shipped: where the controls come from if they are those that ship with Esper.
        rule_episodes: number of episodes over which the rules were searched: every plan and every
            variant of try-and-keep on every training host; None if it was not recorded.
        policy_episodes: number of episodes on which the policy was trained, 0 if it was not
            trained; None as above.
        differences: the policy against its opponents.
        rents: price of parameters on each host, ``[H]``; empty if it was not recorded.
        training_prices: price of e times the operations of training, as above.
        front: rungs by thirds of the price, from the lowest; empty where prices are not drawn.
    """

    policy: str
    suite: str
    training_hosts: int
    tasks: list[str]
    plans: list[str]
    rungs: list[Rung]
    splits: list[int | None]
    schema: int = SCHEMA
    shipped: str | None = None
    rule_episodes: int | None = None
    policy_episodes: int | None = None
    differences: list[Difference] = []
    rents: list[float] = []
    training_prices: list[float] = []
    front: list[PricedRung] = []


def encoded(evaluation: Evaluation) -> bytes:
    """The content of the file of an evaluation, with its checksum."""
    return sealed_json(msgspec.to_builtins(evaluation))


def read_evaluation(path: Path) -> Evaluation:
    """Read the file of an evaluation.

    Raises:
        UsageError: it cannot be read, is damaged, or has another format.
    """
    try:
        evaluation = msgspec.convert(read_sealed_json(path), Evaluation)
    except DamagedFile as error:
        raise UsageError(f"evaluation: {path} is damaged ({error}); evaluate again") from error
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(f"evaluation: cannot read {path} ({error}); evaluate again") from error
    if evaluation.schema != SCHEMA:
        raise UsageError(
            f"evaluation: {path} has schema {evaluation.schema}, not {SCHEMA}; evaluate again"
        )
    fault = _fault(evaluation)
    if fault is not None:
        raise UsageError(f"evaluation: {path} is damaged ({fault}); evaluate again")
    return evaluation


def _fault(evaluation: Evaluation) -> str | None:
    """Why an evaluation cannot be shown, if it cannot."""
    hosts, names = len(evaluation.tasks), [rung.name for rung in evaluation.rungs]
    if hosts == 0 or names[:1] != [NEVER_GROW]:
        return f"it does not begin with {NEVER_GROW!r} on at least one host"
    if not all({*names} & {*kind} for kind in (BLIND, LOOKING, (CLAIRVOYANT,))):
        return "controls are missing"
    for rung in evaluation.rungs:
        columns = [getattr(rung, name) for name in COLUMNS]
        if any(column is not None and len(column) != hosts for column in columns):
            return f"{rung.name!r} has not one value per host"
        if any(not 0 <= plan < len(evaluation.plans) for plan in rung.chosen or []):
            return f"{rung.name!r} chooses an unknown plan"
    prices = evaluation.rents, evaluation.training_prices
    if any(each and len(each) != hosts for each in prices):
        return "it has not one price per host"
    return None
