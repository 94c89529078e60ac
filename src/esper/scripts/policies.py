"""``esper policies``: the policies that come with Esper, and their cards."""

from dataclasses import dataclass
from textwrap import fill

from rich.console import Console

from esper.leyline.config.setting import setting
from esper.scripts.flags import parse
from esper.tamiyo.policy_box import OBSERVATION, Card, card_of, cards

TITLES = {"What it does": "does", "Trained on": "trained", "Where it fails": "fails"}
"""Sections of the list, and what stands before them."""
WIDEST = 100
"""Most columns of a line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoliciesArguments:
    """List the policies that come with Esper, or show the cards of those named.

    A card says what a policy does, on what it was trained and where it fails. `esper grow --policy
    NAME` and `esper.grow(policy=NAME)` use it; a run directory is a policy as well.
    """

    names: tuple[str, ...] = setting((), positional=True)
    """Policies whose whole cards are shown."""


def policies(arguments: list[str]) -> int:
    """List the policies that come with Esper, with their cards."""
    options = parse(PoliciesArguments, "esper policies", arguments)
    if options.names:
        print("\n\n".join(card_of(name).text.strip() for name in options.names))
        return 0
    width = min(Console().width, WIDEST)
    for card in cards().values():
        print(_entry(card, width))
    print(f"observation of this version: {OBSERVATION}")
    return 0


def _entry(card: Card, width: int) -> str:
    """A policy in lines of at most ``width`` columns."""
    lines = [("", card.summary)]
    lines += [(word, card.sections[title]) for title, word in TITLES.items()]
    if card.is_trained:
        lines.append(("sees", f"observation {card.observation}"))
    kind = "trained" if card.is_trained else "a rule"
    paragraphs = [
        fill(text, width, initial_indent=f"  {word:<9}", subsequent_indent=" " * 11)
        for word, text in lines
    ]
    return "\n".join([f"{card.name} ({kind})", *paragraphs])
