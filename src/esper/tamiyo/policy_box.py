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
    def learned(self) -> bool:
        """Whether it was trained; else it is a rule in code."""
        return (self.path / RUN).exists()

    @property
    def summary(self) -> str:
        """What it does, in a sentence."""
        return _joined(self.text.partition("\n## ")[0].partition("\n")[2])

    @property
    def sections(self) -> Mapping[str, str]:
        """The text of each of ``SECTIONS`` that the card has."""
        parts = (part.partition("\n") for part in self.text.split("\n## ")[1:])
        return {title.strip(): _joined(text) for title, _, text in parts}

    @property
    def observation(self) -> str | None:
        """Version of the observation on which it was trained: the first ``code`` of that section.

        None for a rule, which fits every version.
        """
        if not self.learned:
            return None
        found = re.search("`(.*?)`", self.sections.get("Observation", ""))
        return found[1] if found else None


def cards(box: Path | None = None) -> dict[str, Card]:
    """All policies in the box by name: rules first, then those that were trained."""
    paths = sorted((BOX if box is None else box).glob(f"*/{CARD}"))
    found = [Card(path.parent.name, path.parent, path.read_text()) for path in paths]
    return {card.name: card for card in sorted(found, key=lambda card: (card.learned, card.name))}


def card_of(name: str) -> Card:
    """The card of a policy in the box.

    Raises:
        UsageError: there is no such policy.
    """
    known = cards()
    if name not in known:
        hint = suggestion(name, known, f"the box holds {', '.join(known)}")
        raise UsageError(f"policy: there is no policy {name!r} in the box; {hint}")
    return known[name]


def learned_path(name: str) -> Path | None:
    """Run directory of the trained policy called ``name``; None if the box has none."""
    card = cards().get(name)
    return card.path if card is not None and card.learned else None


def _joined(text: str) -> str:
    return " ".join(text.split())
