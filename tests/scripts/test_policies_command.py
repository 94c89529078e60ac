"""``esper policies`` lists what is in the box, with whole cards."""

from pathlib import Path

import pytest

from esper.leyline.errors import UsageError
from esper.scripts.policies import policies
from esper.simic.own_models.policies import POLICIES
from esper.tamiyo import policy_box
from esper.tamiyo.policy_box import SECTIONS, cards


def test_every_policy_in_the_box_has_a_whole_card() -> None:
    found = cards()
    assert {card.name for card in found.values() if not card.learned} == set(POLICIES)
    for card in found.values():
        assert card.text.startswith(f"# {card.name}\n")
        assert card.summary
        assert tuple(card.sections) == SECTIONS
        assert all(card.sections.values())
        assert (card.observation == policy_box.OBSERVATION) == card.learned


def test_the_list_shows_every_card_within_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = tmp_path / "a_trained_one"
    trained.mkdir()
    (trained / "config.json").write_text("{}")
    (trained / "card.md").write_text(
        "# a_trained_one\n\nGrows digits.\n\n## What it does\n\nGrows.\n\n"
        "## Trained on\n\ndigits\n\n"
        "## Where it fails\n\nElsewhere, " + "and elsewhere, " * 20 + ".\n\n"
        "## Observation\n\nVersion `12ab`.\n"
    )
    for card in cards().values():
        (tmp_path / card.name).symlink_to(card.path)
    (tmp_path / "no_card").mkdir()
    monkeypatch.setattr(policy_box, "BOX", tmp_path)
    assert policies([]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line for line in lines if not line.startswith(" ")]
    rules = [f"{name} (a rule)" for name in sorted(POLICIES)]
    assert names[:-1] == [*rules, "a_trained_one (trained)"]
    assert max(map(len, lines)) <= 80
    assert "  sees     observation 12ab" in lines
    assert "  trained  digits" in lines
    assert policies(["rule"]) == 0
    assert capsys.readouterr().out == (policy_box.BOX / "rule" / "card.md").read_text()
    with pytest.raises(UsageError, match="no policy 'rul' in the box; did you mean 'rule'"):
        policies(["rul"])
