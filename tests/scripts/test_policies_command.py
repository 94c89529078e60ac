"""``esper policies`` lists what is in the box, with whole cards."""

import json
from pathlib import Path

import pytest

from esper.leyline.errors import UsageError
from esper.scripts.policies import policies
from esper.simic.tools.grow import GrowingPolicy
from esper.tamiyo import policy_box
from esper.tamiyo.policy_box import SECTIONS, cards
from esper_lab.ladder_steps import points_text

RULES = {"deepen", "heuristic", "never", "rule", "widen"}
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_every_policy_in_the_box_has_a_whole_card() -> None:
    found = cards()
    assert {card.name for card in found.values() if not card.is_trained} == RULES
    for card in found.values():
        assert card.text.startswith(f"# {card.name}\n")
        assert card.summary
        assert tuple(card.sections) == SECTIONS
        assert all(card.sections.values())
        assert (card.observation == policy_box.OBSERVATION) == card.is_trained


def test_the_list_shows_every_card_within_the_terminal(tmp_path, capsys, monkeypatch) -> None:
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
    rules = [f"{name} (a rule)" for name in sorted(RULES)]
    assert names[:-1] == [*rules, "a_trained_one (trained)", "keep-or-move (trained)"]
    assert max(map(len, lines)) <= 80
    assert "  sees     observation 12ab" in lines
    assert "  trained  digits" in lines
    assert policies(["rule"]) == 0
    assert capsys.readouterr().out == (policy_box.BOX / "rule" / "card.md").read_text()
    with pytest.raises(UsageError, match="no policy 'rul' in the box; did you mean 'rule'"):
        policies(["rul"])


def test_the_figures_of_the_trained_policy_are_those_of_its_results() -> None:
    text = " ".join(cards()["keep-or-move"].text.split())
    found = json.loads((RESULTS / "policy.json").read_text())
    one, others = found["policies"]["greedy"], found["comparisons"]
    for name in ("gain", "above_rule", "above_misled", "above_yoked"):
        assert points_text(one[name]) in text, name
    assert f"{found['share_of_gap']['greedy']:.0%}" in text
    for family, other in others.items():
        best = max(other["rules"], key=lambda rule: other["rules"][rule][0])
        assert points_text(other["above"][best]) in text, family
    for kind in found["kinds"]:
        assert f"{kind['difference']:+.1f}" in text, kind
        if kind["worse"] > 0.1:
            assert f"{kind['worse']:.0%}" in text, kind
    assert points_text(found["policies"]["sampled"]["above_rule"]) in text
    assert f"by {-one['above_network'][0]:.1f} points" in text
    policy = GrowingPolicy.named("keep-or-move")
    assert f"{policy.episodes:,} recorded episodes" in text


def test_the_trained_policy_acts_with_the_weights_that_were_scored() -> None:
    """Small enough to ship, whole, without the optimizer's state and without anybody's paths."""
    card = cards()["keep-or-move"]
    files = [path for path in card.path.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 500_000
    content = json.loads((card.path / "config.json").read_text())
    assert content["fingerprint"]["command"] == []
    assert content["settings"]["telemetry_dir"] == "./runs"
    policy = GrowingPolicy.named("keep-or-move")
    assert policy.greedy_by_default
    assert policy.settings.world.task == ("one_seed",)
    agent = policy.agent(seed=3)
    assert not agent.greedy
    assert all(bool(weight.isfinite().all()) for weight in agent.policy.parameters())
