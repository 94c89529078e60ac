"""The controller: seeds hang in a module, learn unseen, join the optimizer, and are judged."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

import esper
from esper.kasmina.lifecycle import Rules
from esper.leyline.actions import ALPHA_SPEED_STEPS, BLUEPRINTS, CANONICAL_CHOICE, HEADS, Op, Style
from esper.leyline.errors import UsageError
from esper.leyline.stages import Stage
from esper.own_models.attachment import grown_seeds
from esper.own_models.controller import Growth
from esper.own_models.growing import grow
from esper.tamiyo.baselines import without_learning
from esper.tamiyo.policy.features import HISTORY, HOST_FEATURES, Observation
from grown_modules import germinated, quietly_grown
from own_modules import (
    Gpt,
    Recurrent,
    ResidualNet,
    images,
    loader,
    perceptron,
    table,
    tokens,
    unchanged,
)

EPOCHS = 12


class Script:
    """Plays given actions, by epoch; where a slot's next gate opens, it may advance."""

    def __init__(self, actions: dict[int, dict[str, int]], advances: bool = True):
        self.actions, self.advances = actions, advances
        self.seen: list[Observation] = []

    def begin(self, environments: Tensor, episode: int) -> None:
        self.seen = []

    def act(self, observation: Observation, step: int) -> tuple[Tensor, Tensor, Tensor]:
        self.seen.append(observation)
        choice = dict(CANONICAL_CHOICE) | {"op": int(Op.WAIT)}
        advance = observation.masks.slots[0, Op.ADVANCE]
        if step in self.actions:
            choice |= self.actions[step]
        elif self.advances and bool(advance.any()):
            choice |= {"op": int(Op.ADVANCE), "slot": int(advance.int().argmax())}
        return without_learning(torch.tensor([[choice[head] for head in HEADS]]))


def plant(slot: int, name: str = "conv_light", style: Style = Style.LINEAR_ADD) -> dict[str, int]:
    heads = {"op": Op.GERMINATE, "slot": slot, "blueprint": BLUEPRINTS.index(name)}
    return {k: int(v) for k, v in heads.items()} | {"style": int(style), "tempo": 0}


def act(op: Op, slot: int) -> dict[str, int]:
    return {"op": int(op), "slot": slot, "alpha_speed": ALPHA_SPEED_STEPS.index(0)}


def train_epoch(model: nn.Module, data: Any, optimizer: Any, growth: Growth | None = None) -> None:
    model.train()
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if growth is not None:
            growth.clip(0.5)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


def accuracy(model: nn.Module, data: Sequence[tuple[Tensor, Tensor]]) -> float:
    with torch.no_grad():
        return float(torch.cat([(model(x).argmax(1) == y).float() for x, y in data]).mean())


class Loop:
    """A residual network that grows by a script in a loop of the user's own."""

    def __init__(self, actions: dict[int, dict[str, int]], count: int = 32, **more: Any):
        torch.manual_seed(0)
        self.model, (self.x, self.y) = ResidualNet(), images(count)
        self.optimizer, self.script = AdamW(self.model.parameters(), lr=0.01), Script(actions)
        if "optimizer" in more:
            self.optimizer = more.pop("optimizer")(self.model)
        options = {"epochs": EPOCHS, "validate": self.score, "report": None}
        self.growth = Growth(self.model, self.optimizer, policy=self.script, **(options | more))

    def score(self) -> float:
        return accuracy(self.model, [(self.x, self.y)])

    def train(self, growth: Growth | None = None) -> None:
        train_epoch(self.model, loader(self.x, self.y), self.optimizer, growth)


def sgd(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.01)


def test_a_seed_that_only_trains_leaves_its_host_as_the_plain_loop_does_bit_for_bit() -> None:
    torch.manual_seed(0)
    model = ResidualNet()
    twin = copy.deepcopy(model)
    data = loader(*images(48), shuffle=True)

    def run(host: nn.Module, grows: bool) -> Growth | None:
        torch.manual_seed(1)
        optimizer = AdamW(host.parameters(), lr=3e-3)
        schedule = CosineAnnealingLR(optimizer, 6)
        growth = None
        if grows:
            script = Script({1: plant(1), 2: act(Op.ADVANCE, 1)}, advances=False)
            growth = Growth(
                host, optimizer, policy=script, epochs=6,
                validate=lambda: accuracy(host, [images(16)]), report=None,
            )  # fmt: skip
        for _ in range(5):
            train_epoch(host, data, optimizer, growth)
            schedule.step()
            if growth is not None:
                growth.step()
        return growth

    growth = run(model, True)
    run(twin, False)
    (seed,) = grown_seeds(model).values()
    assert growth.history[-1].stages["layer1.1"] is Stage.TRAINING
    assert seed.conv_light.conv.weight.abs().sum() > 0
    esper.strip(model)
    assert unchanged(model, twin.state_dict())


def test_a_life_from_germination_to_fossilisation() -> None:
    loop = Loop(
        {1: plant(2, style=Style.GATED_GATE), 9: act(Op.FOSSILISE, 2)},
        64,
        optimizer=lambda model: SGD(model.parameters(), lr=0.05, momentum=0.9),
        example=images(64)[0][:4],
    )
    model, optimizer, growth = loop.model, loop.optimizer, loop.growth
    groups = len(optimizer.param_groups)
    rules, stages, alphas = Rules.for_horizon(EPOCHS, 4), [], []
    host = sum(p.numel() for p in model.parameters())
    for epoch in range(EPOCHS):
        loop.train(growth)
        record = growth.step()
        stages.append(record.stages["layer2.0"])
        seeds = grown_seeds(model)
        alphas.append(float(seeds["layer2.0"].alpha) if seeds else 0.0)
        in_optimizer = {id(p) for group in optimizer.param_groups for p in group["params"]}
        assert in_optimizer == {id(p) for p in model.parameters()}
        assert record.parameters == host + sum(
            p.numel() for s in seeds.values() for p in s.parameters()
        ), epoch
    expected = [Stage.GERMINATED, Stage.TRAINING] + [Stage.TRAINING] * (rules.training_age - 1)
    assert stages[: len(expected)] == expected
    assert stages[-4:] == [Stage.FOSSILISED] * 4
    assert stages[len(expected)] is Stage.BLENDING
    start = len(expected)
    assert alphas[start : start + 4] == pytest.approx([0.0, 1 / 3, 2 / 3, 1.0])
    assert len(optimizer.param_groups) == groups
    assert all(p.requires_grad for p in model.parameters())
    acting = [r for r in growth.history if r.contributions]
    assert {slot for r in acting for slot in r.contributions} == {"layer2.0"}
    assert growth.finished
    with pytest.raises(UsageError, match="growth ended after epoch 12"):
        growth.step(0.5)
    texts = " ".join(text for r in growth.history for text in r.actions)
    for word in ("germinates, GATED_GATE", "BLENDING", "HOLDING", "FOSSILISED", "contribution"):
        assert word in texts


def test_the_contribution_is_the_score_with_the_seed_minus_that_without() -> None:
    x, y = images(64)

    def score(model: nn.Module) -> float:
        with torch.no_grad():
            return float(model(x).softmax(1).gather(1, y[:, None]).mean())

    loop = Loop({1: plant(0)}, 64, epochs=9, validate=lambda: score(loop.model))
    for _ in range(8):
        loop.train()
        whole = copy.deepcopy(loop.model).eval()
        record = loop.growth.step()
        if record.contributions:
            without = copy.deepcopy(whole)
            grown_seeds(without)["layer1.0"].alpha.zero_()
            scores = [score(whole), score(without)]
            contribution = pytest.approx(scores[0] - scores[1], abs=1e-6)
            assert record.contributions["layer1.0"] == contribution
            assert record.validation.score == pytest.approx(scores[0])
    assert record.contributions


def test_the_scale_of_a_loss_does_not_hold_a_seed_back() -> None:
    torch.manual_seed(0)
    model = perceptron()
    reached = set()
    for scale in (1.0, 1e4):
        result = quietly_grown(
            copy.deepcopy(model), loader(*table(64)), loader(*table(64, 1)),
            loss=lambda output, target, scale=scale: scale * F.mse_loss(output, target), epochs=12,
        )  # fmt: skip
        reached |= {(scale, stage) for r in result.history for stage in r.stages.values()}
    assert {(1.0, Stage.HOLDING), (1e4, Stage.HOLDING)} <= reached


def test_a_pruned_seed_leaves_module_and_optimizer() -> None:
    loop = Loop({1: plant(0), 3: act(Op.PRUNE, 0)})
    model, optimizer = loop.model, loop.optimizer
    names = list(model.state_dict())
    for _ in range(3):
        loop.train()
        record = loop.growth.step()
    assert record.stages["layer1.0"] is Stage.PRUNED
    assert list(model.state_dict()) == names
    assert not any(module._forward_hooks for module in model.modules())
    own = {id(p) for p in model.parameters()}
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == own
    assert {id(p) for p in optimizer.state} == own


@pytest.mark.parametrize("named", [False, True])
def test_seeds_join_the_group_before_them_or_the_one_called_seeds(named: bool) -> None:
    def grouped(model: nn.Module) -> SGD:
        early = [*model.stem.parameters(), *model.layer1.parameters()]
        late = [*model.layer2.parameters(), *model.head.parameters()]
        groups = [{"params": early, "lr": 1e-4}, {"params": late, "lr": 1e-2}]
        return SGD(groups + [{"params": [], "lr": 0.5, "name": "seeds"}] * named, lr=1.0)

    actions = {1: plant(1), 2: act(Op.ADVANCE, 1)}
    loop = Loop(actions, 16, optimizer=grouped, example=images(16)[0])
    loop.growth.step()
    mine = {id(p) for p in grown_seeds(loop.model)["layer1.1"].parameters()}
    groups = loop.optimizer.param_groups
    where = [i for i, group in enumerate(groups) if mine & {id(p) for p in group["params"]}]
    assert where == ([2] if named else [0])


def test_a_module_that_diverges_is_restored_and_its_seeds_are_pruned() -> None:
    loop = Loop({1: plant(0)})
    model, growth = loop.model, loop.growth
    for _ in range(4):
        loop.train()
        if not growth.history:
            good = copy.deepcopy(model.state_dict())
        growth.step()
    with torch.no_grad():
        model.head.weight.fill_(float("nan"))
    loop.train()
    record = growth.step(train_loss=float("nan"))
    assert record.actions[0] == "rolled back: not_finite"
    assert not grown_seeds(model)
    assert unchanged(model, good)
    loop.train()
    assert growth.step().actions == []


def test_no_seed_is_planted_that_the_limit_of_parameters_forbids() -> None:
    host = sum(p.numel() for p in ResidualNet().parameters())
    gated = plant(3, "norm", Style.GATED_GATE)
    actions = {1: plant(3, "conv_heavy"), 2: gated, 3: plant(3, "norm")}
    options = {"max_parameters": host + 40, "example": images(16)[0]}
    loop = Loop(actions, 16, optimizer=sgd, **options)
    growth, script = loop.growth, loop.script
    assert growth.step().actions == []
    assert growth.step().actions == []
    assert "norm germinates" in growth.step().actions[0]
    growth.step()
    sizes = [slot.parameter_table[:, Style.LINEAR_ADD] for slot in growth.slots]
    # Where the norm of 17 parameters lives, only 23 of the 40 are left.
    for seen, left in ((script.seen[0], 40), (script.seen[-1], 23)):
        for s, slot in enumerate(growth.slots):
            allowed = set(seen.masks.kinds[0, s].nonzero()[:, 0].tolist())
            assert allowed == {k for k in slot.kinds if sizes[s][k] <= left}
    with pytest.raises(UsageError, match="max_parameters: the module has"):
        Loop({}, max_parameters=1)


def test_losses_count_as_scores_where_lower_is_better() -> None:
    model = perceptron()
    values = iter([2.0, 1.0, 0.5])
    options = {"policy": "never", "higher_is_better": False, "report": None}
    growth = Growth(model, sgd(model), **options)
    records = [growth.step(next(values)) for _ in range(3)]
    results = [(r.validation.loss, r.validation.score) for r in records]
    assert results == [(2.0, 0.0), (1.0, 0.5), (0.5, 0.75)]


REFUSED = {
    "no module": (lambda: "net", {}, r"model: got a str; give an nn.Module"),
    "compiled": (lambda: torch.compile(perceptron()), {}, r"model: it is compiled"),
    "parallel": (lambda: nn.DataParallel(perceptron()), {}, r"give model.module"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(3)), {}, r"model: it has lazy layers"),
    "optimizer": (perceptron, {"optimizer": None}, r"it has no parameter of the model"),
    "epochs": (perceptron, {"epochs": 0}, r"epochs: got 0"),
    "price": (perceptron, {"price": -1.0}, r"price: got -1.0"),
    "no number": (perceptron, {"price": "1"}, r"price: got '1'; give a number"),
    "no limit": (perceptron, {"max_parameters": float("nan")}, r"max_parameters: got nan"),
    "validate": (perceptron, {"policy": "heuristic"}, r"policy 'heuristic' needs the score"),
    "policy": (
        perceptron, {"policy": "heuristc", "validate": lambda: 0.5, "example": torch.randn(2, 5)},
        r"policy: 'heuristc' is neither one of deepen, heuristic, never, rule, widen",
    ),
    "no call": (
        perceptron, {"policy": "rule", "validate": lambda: 0.5},
        r"the module has not been called yet",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_one_line(case: str) -> None:
    build, change, message = REFUSED[case]
    model = build()
    arguments: dict[str, Any] = {"policy": "never", "report": None, "optimizer": model} | change
    owner = arguments.pop("optimizer")
    parameters = list(owner.parameters()) if isinstance(owner, nn.Module) else []
    made = SGD(parameters or [nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(UsageError, match=message) as caught:
        Growth(model, made, **arguments).step(0.5)
    assert "\n" not in str(caught.value)


def test_a_score_in_percent_is_refused() -> None:
    model = perceptron()
    growth = Growth(model, sgd(model), policy="never", report=None)
    with pytest.raises(UsageError, match="1 is perfect; give a fraction instead of percent"):
        growth.step(87.5)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_score_that_is_not_finite_is_mentioned_once(value: float) -> None:
    model, lines = perceptron(), []
    growth = Growth(model, sgd(model), policy="never", report=lines.append)
    for score in (0.5, value, 0.5, value):
        growth.step(score)
    warnings = [line for line in lines if line.startswith("warning")]
    assert warnings == [
        f"warning: the validation score is {value}; no seed can be measured until it is finite"
    ]
    assert lines.index(warnings[0]) == 1, "it comes before the line of its epoch"


def test_what_a_policy_sees() -> None:
    validation = esper.Validation(0.7, 0.4, 0.6)
    loop = Loop({}, optimizer=sgd, validate=lambda: validation, example=images(32)[0])
    loop.growth.begin()
    loop.growth.step(train_loss=0.5)
    seen = dict(zip(HOST_FEATURES, loop.script.seen[0].host[0].tolist(), strict=True))
    assert seen["progress"] == pytest.approx(1 / EPOCHS)
    assert seen["validation_loss"] == pytest.approx(float(torch.tensor(0.7).log1p()))
    assert seen["train_loss"] == pytest.approx(float(torch.tensor(0.5).log1p()))
    assert seen["expected_accuracy"] == pytest.approx(0.4)
    assert seen["train_accuracy"] == -1.0
    # ``begin`` noted the score before training.
    assert seen[f"accuracy_history_{HISTORY - 1}"] == pytest.approx(0.4)
    assert seen[f"accuracy_history_{HISTORY - 2}"] == -1.0


@pytest.mark.parametrize("policy", ["heuristic", "rule"])
@pytest.mark.parametrize("kind", ["images", "text", "recurrent", "table"])
def test_policies_grow_every_kind_of_module(kind: str, policy: str) -> None:
    torch.manual_seed(0)
    text = tokens(32)
    cases: dict[str, tuple[nn.Module, Any, Any, str]] = {
        "images": (ResidualNet(), images(32), images(32, 1), "cross_entropy"),
        "text": (Gpt(), (text,), (tokens(32, 1),), "cross_entropy"),
        "recurrent": (Recurrent(), (text,), (tokens(32, 1),), "cross_entropy"),
        "table": (perceptron(), table(32), table(32, 1), "mse"),
    }
    model, train, held_back, loss = cases[kind]
    if kind in ("text", "recurrent"):
        batches, others = [b[0] for b in loader(*train)], [b[0] for b in loader(*held_back)]
    else:
        batches, others = list(loader(*train)), list(loader(*held_back))
    before = type(model), sum(p.numel() for p in model.parameters())
    result = grow(model, batches, others, loss=loss, epochs=16, policy=policy, progress=False)
    assert (type(result.model), result.host_parameters) == before
    assert result.parameters == before[1] + sum(
        p.numel() for seed in grown_seeds(model).values() for p in seed.parameters()
    )
    assert set(result.seeds) <= {s for s in result.history[-1].stages}
    assert result.validation.score <= 1.0
    if policy == "rule":
        assert germinated(result)
    assert all(p.requires_grad for p in model.parameters())
    assert not any(p.isnan().any() for p in model.parameters())
