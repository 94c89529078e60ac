"""The policies that come with Esper, each described by a card.

A policy is a folder of ``esper/policies`` with a ``card.md``. One that was trained is also a run
directory: ``config.json`` and ``checkpoints``.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import esper
from esper.leyline.errors import UsageError, suggestion
from esper.tamiyo.policy.features import HOST_FEATURES, SLOT_FEATURES

BOX = Path(esper.__file__).parent / "policies"
"""Where the policies lie."""
CARD, RUN = "card.md", "config.json"
SECTIONS = ("What it does", "Trained on", "Where it fails", "Observation")
"""Sections of a card."""
OBSERVATION = hashlib.sha256(" ".join((*HOST_FEATURES, *SLOT_FEATURES)).encode()).hexdigest()[:8]
"""Version of the observation: it changes with the names or the order of the features."""


@dataclass(frozen=True, slots=True)
class Card:
    """A policy in the box.

    Attributes:
        name: its name, that of its folder.
        path: its folder.
        text: the whole card, Markdown.
    """

    name: str
    path: Path
    text: str

    @property
    def is_trained(self) -> bool:
        """Whether it was trained; else it is a rule in code."""
        return (self.path / RUN).exists()

    @property
    def summary(self) -> str:
        """What it does, in a sentence."""
        return _one_line(self.text.partition("\n## ")[0].partition("\n")[2])

    @property
    def sections(self) -> Mapping[str, str]:
        """The text of each of ``SECTIONS`` that the card has."""
        parts = (part.partition("\n") for part in self.text.split("\n## ")[1:])
        return {title.strip(): _one_line(text) for title, _, text in parts}

    @property
    def observation(self) -> str | None:
        """Version of the observation on which it was trained: the first ``code`` of that section.

        None for a rule, which fits every version.
        """
        if not self.is_trained:
            return None
        match = re.search("`(.*?)`", self.sections.get("Observation", ""))
        return match[1] if match else None


def cards(box: Path | None = None) -> dict[str, Card]:
    """All policies in the box by name: rules first, then those that were trained."""
    paths = sorted((BOX if box is None else box).glob(f"*/{CARD}"))
    box_cards = [Card(path.parent.name, path.parent, path.read_text()) for path in paths]
    return {
        card.name: card for card in sorted(box_cards, key=lambda card: (card.is_trained, card.name))
    }


def card_of(name: str) -> Card:
    """The card of a policy in the box.

    Raises:
        UsageError: there is no such policy.
    """
    policies = cards()
    if name not in policies:
        hint = suggestion(name, policies, f"the box holds {', '.join(policies)}")
        raise UsageError(f"policy: there is no policy {name!r} in the box; {hint}")
    return policies[name]


def learned_path(name: str) -> Path | None:
    """Run directory of the trained policy called ``name``; None if the box has none."""
    card = cards().get(name)
    return card.path if card is not None and card.is_trained else None


def _one_line(text: str) -> str:
    return " ".join(text.split())
