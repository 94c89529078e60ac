"""The policies by name: what the rule plants, and a policy that a run trained."""

import shutil
from pathlib import Path

import pytest
import torch

import esper
from esper.kasmina.slots import SlotSpec
from esper.leyline.actions import BLUEPRINTS
from esper.leyline.errors import UsageError
from esper.own_models.lifecycle_controller import _trend, actor
from esper.runtime.tasks import find
from esper.simic.tools.grow import GrowingPolicy
from esper.simic.training.vectorized import train_ppo_vectorized
from esper.tamiyo import policy_box
from esper.tamiyo.policy import features
from esper.tamiyo.try_and_keep import OF_OWN_MODELS, RuleActor, Trial, trial_of
from own_modules import Gpt, ResidualNet, images, loader, tokens
from small_runs import SMALL


def test_the_rule_plants_what_a_slot_accepts_and_leaves_time_to_fossilise() -> None:
    slots = (
        SlotSpec("a", 8, (4, 4), 0.3, "conv"),
        SlotSpec("b", 8, (1, 1), 0.6, "mlp"),
        SlotSpec("c", 8, (1, 5), 1.0, "sequence", ("norm", "lora")),
    )
    rule = actor("rule", slots, 40, 0, print)
    assert isinstance(rule, RuleActor)
    assert (rule.slots(), rule.settings) == ([slots], OF_OWN_MODELS)

    def trial(epochs: int) -> Trial:
        return trial_of([slots], len(slots), epochs, OF_OWN_MODELS)

    names = [BLUEPRINTS[kind] for kind in trial(40).blueprint[0].tolist()]
    assert names[:2] == ["conv_light", "mlp_small"]
    assert names[2] in ("norm", "lora")
    assert set(names[:2]) <= set(OF_OWN_MODELS.blueprints)
    assert int(trial(40).decision) == 28
    for epochs in (6, 10, 40):
        decision = int(trial(epochs).decision)
        assert decision + len(slots) + 1 <= epochs or decision == 1


def test_a_policy_of_a_run_grows_a_module_and_says_where_it_was_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train_ppo_vectorized(task="digits_shift", rounds=1, telemetry_dir=str(tmp_path), **SMALL)
    capsys.readouterr()
    torch.manual_seed(0)
    modules = (
        (ResidualNet(), loader(*images(16)), loader(*images(16, 1))),
        (Gpt(), [tokens(16)], [tokens(16, 1)]),
    )
    for model, train, held_back in modules:
        result = esper.grow(model, train, held_back, policy=str(run.path), epochs=4)
        assert len(result.history) == 4
        assert "was trained on digits_shift; on a module of your own it is untested" in (
            capsys.readouterr().out
        )
    box = tmp_path / "box"
    shutil.copytree(run.path, box / "shipped")
    card = "# shipped\n\nGrows digits.\n\n## Observation\n\nVersion `{}` of the observation.\n"
    monkeypatch.setattr(policy_box, "BOX", box)
    (box / "shipped" / "card.md").write_text(card.format(policy_box.OBSERVATION))
    esper.grow(Gpt(), [tokens(16)], [tokens(16, 1)], policy="shipped", epochs=4)
    assert "policy shipped was trained on digits_shift" in capsys.readouterr().out
    with monkeypatch.context() as patch:
        patch.setattr(features, "CRITIC_FEATURES", features.CRITIC_FEATURES[1:])
        with pytest.raises(
            UsageError,
            match=r"^policy: the checkpoint's policy observes twin_score, which this version does",
        ):
            esper.grow(Gpt(), [tokens(16)], [tokens(16, 1)], policy="shipped", epochs=4)
    named = GrowingPolicy.named(str(run.path))
    foreign = [
        name for name in ("digits_shift", "digits") if named.trained_on_other_tasks(find(name))
    ]
    assert foreign == ["digits"]
    monkeypatch.undo()
    with pytest.raises(
        UsageError, match="deepen, heuristic, never, rule, widen, keep-or-move nor a run"
    ):
        esper.grow(model, train, held_back, policy=str(tmp_path / "none"), epochs=4)


def test_the_trend_of_the_loss_is_a_mean_per_epoch() -> None:
    nan = float("nan")
    assert _trend(torch.tensor([[nan, 2.0, 1.0, 1.6]])) == (
        "validation loss -10.0 % an epoch over the last 2"
    )
    assert _trend(torch.tensor([[nan, 2.0]])) == "first epochs"
