"""The step functions of the native library compared with torch on the same rows."""

import copy
import logging
import math
import pickle
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from esper.kasmina.hosts.cnn import CnnHost
from esper.kasmina.lifecycle import Rules
from esper.kasmina.seeds import SeedSignals, SeedState
from esper.leyline.actions import BLUEPRINTS, CURVE_STEEPNESS, HEAD_WIDTHS, HEADS, Curve, Op, Style
from esper.leyline.stages import Stage
from esper.native import library
from esper.native.build import Unavailable
from esper.runtime import data
from esper.runtime.tasks import Task
from esper.simic.growth import native_spec, native_step
from esper.simic.growth import shard as shards
from esper.simic.growth.environment import GrowthEnv
from esper.simic.growth.native_blocks import SignalsInBlocks, StateInBlocks
from esper.simic.growth.native_step import NativeStep, step_functions
from esper.simic.growth.shard import Shard
from esper.simic.growth.step import GrowthConfig
from esper.simic.growth.step_functions import RowsAfterStep, TorchStep
from esper.tamiyo.policy.features import (
    CRITIC_FEATURES,
    EMPTY_SLOT_SIGNALS,
    HISTORY,
    HOST_FEATURES,
    SLOT_FEATURES,
    Progress,
)
from esper.tolaria.backends import EpochResult, Scores
from esper.tolaria.engine import Measurement
from esper.tolaria.governor import Governor, Reason
from esper.tolaria.precision import Precision
from esper.tolaria.slot_measures import SLOT_MEASURES
from support import CPU, needs_native

pytestmark = needs_native

LENGTH = 24
NAN, INF = math.nan, math.inf
ODD = (NAN, INF, -INF, 0.0, 1e-9, 1e-7, 0.7, 10.0, 11.0, 1e20)
LOGARITHMIC = {
    "validation_loss",
    *(f"loss_history_{i}" for i in range(HISTORY)),
    *("train_loss", "log_growth", "gradient_norm", "log_gradient_ratio", "log_seed_share"),
    *EMPTY_SLOT_SIGNALS,
}
CURVED = {"alpha", "alpha_velocity", "ramp_start"}


def growth_env(count: int = 8, channels: tuple[int, ...] = (3, 4, 4), **settings) -> GrowthEnv:
    """A tiny task on the native backend."""
    host = CnnHost(channels=channels, classes=10, image=(8, 8, 1))
    task = Task("tiny", "digits on a tiny host", host, lambda: data.digits())
    chosen = {"group_size": 8, "max_batches": 1, "batch_size": 8, "backend": "native"} | settings
    config = GrowthConfig(seed=5, episode_length=LENGTH, **chosen)
    return GrowthEnv([task], torch.arange(count), config, Precision("cpu"), CPU)


def shard_of(**settings) -> Shard:
    """A shard with fresh hosts."""
    environment = growth_env(**settings)
    environment.reset(0)
    (shard,) = environment.shards
    return shard


@pytest.fixture(scope="module")
def shard() -> Shard:
    """Two hundred rows and more."""
    return shard_of(count=200)


def assert_same(found: Tensor, expected: Tensor, curved: bool = False) -> None:
    """Equal bits, or within 1e-6 if a transcendental function is involved."""
    tolerance = 1e-6 if curved else 0.0
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def assert_same_record(found, expected, curved: set[str] = frozenset()) -> None:
    """Field by field."""
    for field in fields(expected):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(other, bool):
            assert one is other
        elif isinstance(other, Tensor):
            assert_same(one, other, field.name in curved)
        else:
            assert_same_record(one, other, curved)


class World:
    """The same rows, stepped by torch and by the library.

    Args:
        shard: shard whose engine describes the rows.
        seed: seed of all draws.
        linear: whether every ramp is linear.
    """

    def __init__(self, shard: Shard, seed: int, linear: bool = False, **rules):
        self.random = torch.Generator().manual_seed(seed)
        self.linear, self.engine = linear, shard.engine
        self.rows, self.slots = len(shard.engine.rows), len(shard.slots)
        limits = replace(Rules.for_horizon(LENGTH, self.slots), **rules)
        made = [
            kind(shard.engine, shard.count, limits, shard.kinds) for kind in (TorchStep, NativeStep)
        ]
        self.torch, self.native = made
        self.count = shard.count
        dormant = SeedState.dormant((self.rows, self.slots), CPU)
        unknown = SeedSignals.unknown((self.rows, self.slots), CPU)
        self.now: list[RowsAfterStep] = [each.begin(dormant, unknown) for each in made]
        self.accuracy = self.floats(self.rows)
        self.most = torch.tensor([(HEAD_WIDTHS | {"slot": self.slots})[head] for head in HEADS])

    def floats(self, *shape: int, odd: float = 0.0) -> Tensor:
        """Numbers in [0, 1), some of them from ``ODD``."""
        drawn = torch.rand(shape, generator=self.random)
        strange = torch.tensor(ODD)[torch.randint(len(ODD), shape, generator=self.random)]
        return torch.where(torch.rand(shape, generator=self.random) < odd, strange, drawn)

    def bools(self, *shape: int, rate: float = 0.5) -> Tensor:
        return torch.rand(shape, generator=self.random) < rate

    def actions(self, wild: float = 0.05) -> Tensor:
        """Arbitrary options, mostly legal, some of them out of range."""
        drawn = (self.floats(self.rows, len(HEADS)) * self.most).long()
        legal = self.now[0].legal.float().flatten(1)
        legal[:, : self.slots] *= 0.1  # waiting is always legal and tests little
        place = torch.multinomial(legal, 1, generator=self.random)[:, 0]
        guided = self.bools(self.rows, rate=0.85)
        drawn[guided, 0] = (place // self.slots)[guided]
        drawn[guided, 1] = (place % self.slots)[guided]
        if self.linear:
            drawn[:, HEADS.index("alpha_curve")] = Curve.LINEAR
            style = HEADS.index("style")
            sigmoid = drawn[:, style] == Style.SIGMOID_ADD
            drawn[sigmoid, style] = Style.LINEAR_ADD
        beyond = torch.tensor([-1, -(2**62), 2**62])[
            torch.randint(3, drawn.shape, generator=self.random)
        ]
        beyond = torch.where(self.bools(*drawn.shape), beyond, self.most)
        return torch.where(self.bools(*drawn.shape, rate=wild / len(HEADS)), beyond, drawn)

    def epoch(self, rolled: Tensor) -> EpochResult:
        """Random training results."""
        epoch = EpochResult(
            loss=self.floats(self.rows),
            accuracy=self.floats(self.rows),
            host_gradient_norm=self.floats(self.rows, odd=0.1),
            seed_gradient_norm=self.floats(self.rows, self.slots, odd=0.2),
            seed_tensor_norms=[
                self.floats(self.rows, slot.segment_count, odd=0.02) for slot in self.engine.slots
            ],
            slots=self.floats(self.rows, self.slots, len(SLOT_MEASURES), odd=0.1),
        )
        epoch.forget(rolled)
        return epoch

    def measurement(self) -> Measurement:
        scores = Scores(*(self.floats(self.rows) for _ in range(3)))
        return Measurement(scores, None, self.floats(self.rows, self.slots, odd=0.2) - 0.3)

    def progress(self, step: int) -> Progress:
        return Progress(
            step=step,
            episode_length=LENGTH,
            losses=5 * self.floats(self.rows, HISTORY + 1, odd=0.1),
            expected=self.floats(self.rows, HISTORY + 1, odd=0.1),
            train_loss=self.floats(self.rows, odd=0.1),
            train_accuracy=self.floats(self.rows, odd=0.1),
            slot_measures=self.floats(self.rows, self.slots, len(SLOT_MEASURES), odd=0.1),
            last_op=torch.randint(len(Op), (self.rows,), generator=self.random),
            success=self.bools(self.rows),
            rolled_back=self.bools(self.rows),
            log_price=self.floats(self.rows),
            deadline=self.floats(self.rows).double(),
        )

    def step(self, t: int) -> None:
        """Take one step with both and compare."""
        curved = set() if self.linear else CURVED
        actions, rolled = self.actions(), self.bools(self.rows, rate=0.03)
        where = rolled if t % 3 else None
        acted = [
            each.act(now.state, actions, now.legal)
            for each, now in zip((self.torch, self.native), self.now, strict=True)
        ]
        assert_same_record(acted[1], acted[0], curved)
        epoch, measurement = self.epoch(rolled & bool(t % 3)), self.measurement()
        self.now = [
            each.advance_lifecycle(does.state, where, now, self.accuracy, epoch, measurement)
            for each, now, does in zip((self.torch, self.native), self.now, acted, strict=True)
        ]
        assert_same_record(self.now[1], self.now[0], curved)
        self.accuracy = measurement.scores.accuracy
        self.compare_features(t)
        if t % 5 == 0:
            # A state that the library did not create.
            self.now[1] = self.now[0]

    def compare_features(self, t: int) -> None:
        progress = self.progress(t)
        scores = self.floats(self.count), self.floats(self.count)
        expected = self.torch.observe(progress, self.now[0], *scores)
        found = self.native.observe(progress, self.now[1], *scores)
        assert_same(found.blueprints, expected.blueprints)
        bent = set() if self.linear else {"alpha", "alpha_velocity"}
        for names, one, other in (
            (HOST_FEATURES, found.host, expected.host),
            (SLOT_FEATURES, found.slots, expected.slots),
            (CRITIC_FEATURES, found.critic, expected.critic),
        ):
            for i, name in enumerate(names):
                assert_same(one[..., i], other[..., i], name in LOGARITHMIC | bent)


# --- all results ------------------------------------------------------------------------------


@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize(
    "rules",
    [
        {"one_at_a_time": False},
        {"strict": True, "one_at_a_time": False, "blending_age": 3},
        {"max_seeds": 2, "one_at_a_time": False, "embargo": 3, "training_age": 1},
        {"prune_age": 4},
    ],
    ids=lambda rules: " ".join(rules),
)
def test_the_library_and_torch_agree(shard: Shard, linear: bool, rules: dict) -> None:
    world, seen, done = World(shard, len(rules), linear, **rules), set(), 0
    for t in range(2 * LENGTH):
        world.step(t)
        state = world.now[0].state
        seen |= set(state.stage.flatten().tolist())
        done += int((state.ramp_done > 0).sum())
    assert seen == {int(stage) for stage in Stage}
    assert done > 1000


@pytest.mark.parametrize("curve", range(len(CURVE_STEEPNESS)))
def test_ramps_follow_their_curves(shard: Shard, curve: int) -> None:
    world = World(shard, 1)
    state = SeedState.dormant((world.rows, world.slots), CPU)
    times = torch.arange(world.rows * world.slots).view(state.stage.shape)
    state.stage[:] = Stage.BLENDING
    state.ramp_mode[:] = 1 + times % 2
    state.ramp_curve[:] = curve
    state.ramp_steps[:] = times % 9
    state.ramp_done[:] = times % 7
    state.ramp_start, state.ramp_target = world.floats(*times.shape), world.floats(*times.shape)
    state.pruning = world.bools(*times.shape)
    zero = torch.zeros(world.rows, dtype=torch.bool)
    inputs = state, None, world.now[0], world.accuracy, world.epoch(zero), world.measurement()
    expected = world.torch.advance_lifecycle(*inputs)
    found = world.native.advance_lifecycle(*inputs)
    exact = curve == Curve.LINEAR
    assert_same_record(found, expected, set() if exact else CURVED)


@pytest.mark.parametrize("rules", [{}, {"strict": True, "blending_age": 3}], ids=["", "strict"])
def test_legal_ops_of_states_that_no_episode_reaches_agree(shard: Shard, rules: dict) -> None:
    world = World(shard, 9, one_at_a_time=False, **rules)
    state, shape = SeedState.dormant((world.rows, world.slots), CPU), (world.rows, world.slots)

    def one_of(*values: float) -> Tensor:
        drawn = torch.randint(len(values), shape, generator=world.random)
        return torch.tensor(values)[drawn]

    state.stage = one_of(*(float(stage) for stage in Stage)).long()
    state.alpha, state.ramp_target = one_of(0.0, 0.5, 1.0), one_of(0.5, 0.7, 1.0)
    state.age, state.stage_age = one_of(*range(25)).long(), one_of(*range(25)).long()
    zero = torch.zeros(world.rows, dtype=torch.bool)
    epoch = world.epoch(zero)
    epoch.seed_tensor_norms = [
        world.floats(*norms.shape, odd=0.3) for norms in epoch.seed_tensor_norms
    ]
    inputs = state, None, world.now[0], world.accuracy, epoch, world.measurement()
    expected = world.torch.advance_lifecycle(*inputs)
    found = world.native.advance_lifecycle(*inputs)
    assert_same_record(found, expected)
    assert expected.legal.any(2).any(0).all()


def test_results_are_not_overwritten_by_later_steps(shard: Shard) -> None:
    world = World(shard, 2)
    kept: list[tuple[SeedState, SeedState]] = []
    for t in range(6):
        world.step(t)
        kept.append((world.now[1].state, world.now[1].state.map(torch.clone)))
    for state, clone in kept:
        assert_same_record(state, clone)


def test_results_can_be_copied_and_pickled(shard: Shard) -> None:
    world = World(shard, 7)
    for t in range(4):
        world.step(t)
    now = world.now[1]
    for record in (now.state, now.own, now.signals, now.own_signals):
        for other in (pickle.loads(pickle.dumps(record)), copy.copy(record), replace(record)):
            assert_same_record(other, record)
            assert not hasattr(other, "nothing")


def test_a_row_does_not_depend_on_its_neighbours(shard: Shard) -> None:
    """In another order, among other neighbours, every row is the same."""
    world = World(shard, 3)
    for t in range(12):
        world.step(t)
    order = torch.randperm(world.rows, generator=world.random)
    now = world.now[1]
    actions, zero = world.actions(), torch.zeros(world.rows, dtype=torch.bool)
    epoch, measurement = world.epoch(zero), world.measurement()
    acted = world.native.act(now.state, actions, now.legal)
    advance = world.native.advance_lifecycle
    after = advance(acted.state, None, now, world.accuracy, epoch, measurement)

    def mixed(x: Tensor) -> Tensor:
        return x[order]

    again = world.native.act(now.state.map(mixed), actions[order], now.legal[order])
    shuffled = replace(
        now,
        state=now.state.map(mixed),
        signals=now.signals.map(mixed),
        seed_parameters=now.seed_parameters[order],
    )
    there = advance(
        again.state,
        None,
        shuffled,
        world.accuracy[order],
        epoch.map(mixed),
        Measurement(measurement.scores.map(mixed), None, measurement.contribution[order]),
    )
    numbers = ("seed_parameters", "seed_parameters_max", "birth_accuracy")
    for name in ("state", "signals", "legal", *numbers):
        expected, found = getattr(after, name), getattr(there, name)
        if isinstance(expected, Tensor):
            assert_same(found, expected[order])
        else:
            assert_same_record(found, expected.map(mixed))


def test_options_out_of_range_are_refused(shard: Shard) -> None:
    world = World(shard, 4)
    now = world.now[1]
    actions = torch.zeros(world.rows, len(HEADS), dtype=torch.long)
    actions[:, 0], actions[:, HEADS.index("blueprint")] = Op.GERMINATE, BLUEPRINTS.index("norm")
    assert world.native.act(now.state, actions, now.legal).success.all()
    for head in range(len(HEADS)):
        for wrong in (-1, int(world.most[head]), 2**40, -(2**40)):
            bad = actions.clone()
            bad[:, head] = wrong
            acted = world.native.act(now.state, bad, now.legal)
            assert not acted.success.any()
            assert_same_record(acted.state, now.state)


# --- the governor -----------------------------------------------------------------------------


def test_the_governor_of_library_and_torch_agree(shard: Shard) -> None:
    world = World(shard, 5)
    stack, classes = shard.engine.stack, shard.engine.host.classes
    expected, found = Governor(stack, classes), Governor(stack, classes)
    fate = torch.arange(world.rows) % 5
    state, seen = world.now[0].state, set()
    for t in range(40):
        state.stage = torch.tensor(list(Stage))[
            torch.randint(len(Stage), state.stage.shape, generator=world.random)
        ]
        loss = 0.4 + 0.2 * world.floats(world.rows)
        late = t > 14
        loss[(fate == 1) & late] = math.log(classes) + 0.02
        loss[(fate == 2) & late] = 20.0 + t % 3
        loss[(fate == 3) & late] = 11.9
        # A deviation of 2 makes 20 a runaway; as a variance, 4 would not.
        loss[fate == 4] = 20.0 if late else 2.0 + 4.0 * (t % 2)
        loss[world.bools(world.rows, rate=0.02)] = INF
        expect = world.floats(world.rows) * 0.25
        epoch = world.epoch(world.bools(world.rows, rate=0.02))
        scores = Scores(loss, world.floats(world.rows), expect)
        reasons = [
            each.check(governor, epoch, scores, state)
            for each, governor in ((world.torch, expected), (world.native, found))
        ]
        assert_same(reasons[1], reasons[0])
        for name in ("losses", "strikes", "healthy"):
            assert_same(getattr(found, name), getattr(expected, name))
        seen |= set(reasons[0].tolist())
    assert seen == {int(reason) for reason in Reason}


# --- in the environment -----------------------------------------------------------------------


def play(monkeypatch: pytest.MonkeyPatch, native: bool) -> list:
    """A whole episode with actions that do not depend on the observations."""
    with monkeypatch.context() as patch:
        if not native:
            patch.setattr(shards, "step_functions", TorchStep)
        environment = growth_env(16)
        environment.reset(3)
        (shard,) = environment.shards
        assert type(shard.functions) is (NativeStep if native else TorchStep)
        world = World(shard, 6, linear=True)
        steps = []
        for _ in range(LENGTH):
            world.now = [shard.now, shard.now]
            steps.append(environment.step(world.actions()[:16]))
    return steps


def test_an_episode_is_the_same_with_library_and_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, found = (play(monkeypatch, native) for native in (False, True))
    stages = set()
    for one, other in zip(found, expected, strict=True):
        assert_same(one.reward, other.reward)
        assert_same(one.observation.host, other.observation.host, curved=True)
        assert_same(one.observation.slots, other.observation.slots, curved=True)
        assert_same(one.observation.critic, other.observation.critic)
        assert_same(one.observation.masks.slots, other.observation.masks.slots)
        assert one.report.added.tolist() == other.report.added.tolist()
        for name in ("before", "acted", "after", "signals"):
            assert_same_record(getattr(one.report, name), getattr(other.report, name))
        for name in ("success", "rollback", "score", "twin_score", "seed_parameters"):
            assert_same(getattr(one.report, name), getattr(other.report, name))
        stages |= set(other.report.after.stage.flatten().tolist())
    assert {Stage.TRAINING, Stage.BLENDING, Stage.EMBARGOED} <= stages


@pytest.mark.parametrize("settings", [{"backend": "torch"}, {"dtype": torch.float64}])
def test_torch_is_used_where_the_library_does_not_apply(settings: dict) -> None:
    assert type(shard_of(**settings).functions) is TorchStep


def test_without_the_library_torch_is_used_and_one_line_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing() -> None:
        raise Unavailable("no luck")

    made = [shard_of() for _ in range(2)]
    monkeypatch.setattr(library, "library", missing)
    with caplog.at_level(logging.WARNING):
        kinds = [
            type(step_functions(each.engine, each.count, each.rules, each.kinds)) for each in made
        ]
    assert kinds == [TorchStep] * 2
    assert caplog.messages == ["native backend: no luck; using torch"]


def test_the_spec_sets_every_field(shard: Shard) -> None:
    spec = shard.functions.spec
    assert all(
        getattr(spec, name) for name in spec.names if not hasattr(getattr(spec, name), "_fields_")
    )
    assert {field.name for field in fields(SeedState)} == set(StateInBlocks.places)
    assert {field.name for field in fields(SeedSignals)} == set(SignalsInBlocks.places)


def test_a_feature_missing_on_one_side_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for names in (HOST_FEATURES[:-1], (*HOST_FEATURES, "another")):
        for module in (native_step, native_spec):
            monkeypatch.setattr(module, "HOST_FEATURES", names)
        with pytest.raises(
            RuntimeError, match=r"observe\.h and .* differ in the number of features"
        ):
            shard_of()
