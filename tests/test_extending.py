"""The blueprint of docs/extending.md, taken from there as a user would, grows like any other."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina.blueprints import BUILDERS
from esper.kasmina.hosts.mlp import MlpHost
from esper.leyline.actions import BLUEPRINTS, HEAD_WIDTHS, HEADS, Op, Style
from esper.leyline.errors import UsageError
from esper.leyline.stages import Stage
from esper.simic.growth.environment import GrowthEnv
from esper.simic.growth.step import GrowthConfig
from esper.simic.training.vectorized import resume_ppo
from esper.tamiyo.policy.factored_lstm import FactoredLSTM
from esper.tamiyo.random_actor import RandomActor
from esper.tolaria.precision import Precision
from oracles import naive
from support import (
    CPU,
    F64,
    LIVES,
    Garden,
    Plant,
    assert_same_environment,
    naive_environments,
    optimisation,
    own_blueprints,
    random_batches,
    random_stack,
    seed_state,
    small_engine,
    small_host,
    small_task,
    train,
    train_naively,
)

EXTENDING = Path(__file__).parent.parent / "docs" / "extending.md"
NAME = "wide_kernel"


def examples(heading: str) -> list[str]:
    """The Python blocks of one section."""
    section = EXTENDING.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)


class WideKernel(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.spread = nn.Conv2d(channels, channels, 5, padding=2, bias=False)
        self.mix = nn.Conv2d(channels, channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(F.relu(self.spread(x)))


@pytest.fixture
def kind(monkeypatch) -> Iterator[int]:
    """Index of the documented blueprint, which is known as long as the test runs."""
    monkeypatch.setitem(naive.CONV_BRANCHES, NAME, WideKernel)
    with own_blueprints():
        exec(examples("A blueprint")[0], {})
        yield BLUEPRINTS.index(NAME)


def growth(rows: int) -> GrowthEnv:
    """Small hosts at the start of an episode."""
    sizes = {"group_size": 2, "episode_length": 8, "max_batches": 1, "batch_size": 6}
    config = GrowthConfig(seed=2, max_seeds=3, reward="terminal", dtype=F64, **sizes)
    return GrowthEnv([small_task(small_host())], torch.arange(rows), config, Precision("cpu"), CPU)


def test_the_blueprint_is_the_last_option_in_slots_of_its_family(kind: int) -> None:
    assert kind == 13 == HEAD_WIDTHS["blueprint"] - 1
    for slot in small_host().slots:
        assert slot.kinds[-1] == kind
        channels = slot.channels
        assert slot.parameter_table[kind, Style.LINEAR_ADD] == 26 * channels**2
    assert all(kind not in slot.kinds for slot in MlpHost((4, 3), 2, (2, 2, 1)).slots)


def test_the_blueprint_trains_like_its_module(kind: int) -> None:
    host = small_host()
    plants = [Plant(NAME, style, **life) for style in Style for life in LIVES.values()]
    garden: Garden = [dict(enumerate(plants[i : i + 3])) for i in range(0, len(plants), 3)]
    garden.append({0: Plant(NAME), 1: Plant("conv_heavy")})
    stack, settings = random_stack(host, len(garden)), optimisation(len(garden), 3)
    batches = random_batches(host, len(garden), count=3)
    environments = naive_environments(host, stack, garden, settings)
    train(host, stack, seed_state(garden, 3), batches, settings)
    train_naively(environments, batches)
    for n, environment in enumerate(environments):
        assert_same_environment(host, stack, n, environment)


def test_a_newborn_seed_of_it_changes_nothing_and_learns(kind: int) -> None:
    garden: Garden = [{0: Plant(NAME, style)} for style in Style]
    engine = small_engine(small_host(), len(garden), torch.float32)
    state = seed_state(garden, 3)
    engine.germinate(state.living, state.blueprint, step=0)
    assert engine.measure(state, 0, committed=False).contribution[:, 0].abs().max() <= 1e-6
    assert (engine.train(state, step=0).seed_gradient_norm[:, 0] > 1e-4).all()


def test_a_policy_picks_it_and_it_grows(kind: int) -> None:
    environment = growth(4)
    policy = FactoredLSTM(16)
    assert policy.blueprint_embedding.num_embeddings == kind + 1 == 14
    with torch.no_grad():
        policy.op_head.out.bias[Op.GERMINATE] = 50.0
        policy.choice_heads["blueprint"].bias[kind] = 50.0
    policy = policy.double()
    observation = environment.reset(0)
    hidden = policy.initial_hidden(4)
    actions, log_prob, _, _ = policy.act(observation, hidden, None)
    assert (actions[:, HEADS.index("blueprint")] == kind).all()
    report = environment.step(actions).report
    assert report.success.all()
    assert (report.acted.blueprint[report.acted.stage == Stage.GERMINATED] == kind).all()
    assert (report.seed_parameters.sum(1) >= 26 * 3**2).all()
    sequence = type(observation).from_tensors(
        {name: part[None] for name, part in observation.tensors().items()}
    )
    evaluated = policy.evaluate_actions(sequence, actions[None], hidden)
    torch.testing.assert_close(evaluated.log_prob[0], log_prob)


def test_a_random_policy_picks_it_among_others(kind: int) -> None:
    environment = growth(32)
    actor = RandomActor(0)
    actor.begin(environment.environments, 0)
    observation, grown = environment.reset(0), set()
    for step in range(4):
        actions, _, _ = actor.act(observation, step)
        result = environment.step(actions)
        observation = result.observation
        grown |= set(result.report.after.blueprint[result.report.after.living].tolist())
    assert kind in grown
    assert len(grown) > 4
    assert max(grown) == kind


def test_a_run_with_it_is_resumed_only_where_it_is_known(
    kind: int, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(examples("A blueprint")[1], {})
    (run,) = (tmp_path / "runs").iterdir()
    manifest = json.loads((run / "checkpoints" / "000001" / "manifest.json").read_text())
    assert manifest["blueprints"] == BLUEPRINTS
    assert manifest["blueprints"][-1] == NAME

    def refusal() -> str:
        with pytest.raises(UsageError) as refused:
            resume_ppo(run, {"rounds": 2})
        assert "\n" not in str(refused.value)
        return str(refused.value)

    register = BLUEPRINTS.append
    with own_blueprints():
        register("another")
        assert "(another not in the checkpoint)" in refusal()
    with own_blueprints():
        BLUEPRINTS.remove(NAME)
        assert f"({NAME} not registered here)" in refusal()
        register("another")
        assert f"({NAME} not registered here, another not in the checkpoint)" in refusal()
    with own_blueprints():
        BLUEPRINTS.reverse()
        assert "in the order noop, conv_light, " in refusal()
    assert len(resume_ppo(run, {"rounds": 2}).rounds) == 1


def test_what_is_forgotten_leaves_nothing_behind() -> None:
    before = list(BLUEPRINTS), dict(BUILDERS), dict(HEAD_WIDTHS), small_host().slots[0].kinds
    with own_blueprints():
        exec(examples("A blueprint")[0], {})
        assert FactoredLSTM(8).choice_heads["blueprint"].out_features == 14
        small_engine(small_host(), 2)
    after = list(BLUEPRINTS), dict(BUILDERS), dict(HEAD_WIDTHS), small_host().slots[0].kinds
    assert after == before
    assert FactoredLSTM(8).choice_heads["blueprint"].out_features == 13
    with own_blueprints():
        # Under the same index and name, another blueprint, of another size.
        exec(examples("A blueprint")[0].replace(", 5, 5)", ", 3, 3)"), {})
        slot = small_host().slots[0]
        assert slot.parameter_table[13, Style.LINEAR_ADD] == 10 * slot.channels**2
