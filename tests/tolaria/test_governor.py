"""The governor: judgements compared with plain Python, snapshots compared bit by bit."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from esper.tolaria.governor import Governor, Reason
from esper.tolaria.results import EpochResult, Scores
from esper.tolaria.stores import Stack
from examples import examples
from oracles.governor import NaiveGovernor
from support import CPU, assert_identical, random_stack, row_of, small_host

HOST = small_host()
CLASSES, SLOTS = HOST.classes, len(HOST.slots)
CHANCE = math.log(CLASSES)
NAN, INF = math.nan, math.inf


@dataclass(frozen=True)
class Moment:
    """Measurements of one step of one host."""

    loss: float
    expected: float = 0.5
    train_loss: float = 0.5
    host_norm: float = 1.0
    seed_norm: float = 1.0
    computing: bool = True

    @property
    def others(self) -> list[float]:
        """Values that are only checked for finiteness."""
        return [self.train_loss, self.host_norm] + [self.seed_norm] * self.computing


CALM = Moment(0.5)


def judged(governor: Governor, moments: list[Moment]) -> list[Reason]:
    """The verdicts for one step of each host."""

    def column(name: str) -> Tensor:
        return torch.tensor([float(getattr(moment, name)) for moment in moments])

    computing = torch.zeros(len(moments), SLOTS, dtype=torch.bool)
    computing[:, 1] = column("computing").bool()
    norms = torch.full((len(moments), SLOTS), NAN)
    norms[:, 1] = column("seed_norm")
    losses, slots = column("train_loss"), torch.full((len(moments), SLOTS, 1), NAN)
    epoch = EpochResult(losses, losses, column("host_norm"), norms, [], slots)
    scores = Scores(column("loss"), column("expected"), column("expected"))
    return [Reason(reason) for reason in governor.check(epoch, scores, computing).tolist()]


def governor_of(rows: int = 1, calm: int = 0) -> Governor:
    """A governor after ``calm`` healthy steps."""
    governor = Governor(random_stack(HOST, rows, torch.float32), CLASSES)
    for _ in range(calm):
        assert judged(governor, [CALM] * rows) == [Reason.NONE] * rows
    return governor


def history(governor: Governor, row: int = 0) -> list[float]:
    return [loss for loss in governor.losses[row].tolist() if not math.isnan(loss)]


# --- one condition at a time ---------------------------------------------------------------------


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["loss", "train_loss", "host_norm", "seed_norm"])
def test_a_non_finite_value_is_rolled_back_at_once(where: str, bad: float):
    governor = governor_of(3)
    moments = [CALM, Moment(**({"loss": 0.5} | {where: bad})), CALM]
    assert judged(governor, moments) == [Reason.NONE, Reason.NOT_FINITE, Reason.NONE]
    assert governor.healthy.tolist() == [True, False, True]


def test_the_norm_of_a_seed_that_was_not_computed_is_ignored():
    assert judged(governor_of(), [Moment(0.5, seed_norm=NAN, computing=False)]) == [Reason.NONE]


@pytest.mark.parametrize(
    ("calm", "loss", "expected", "reason"),
    [
        (10, CHANCE, 0.25, Reason.COLLAPSE),
        (9, CHANCE, 0.25, Reason.NONE),  # the history is too short
        (10, CHANCE * 1.064, 0.25, Reason.COLLAPSE),
        (10, CHANCE * 1.066, 0.25, Reason.NONE),
        (10, CHANCE * 0.936, 0.25, Reason.COLLAPSE),
        (10, CHANCE * 0.934, 0.25, Reason.NONE),
        (10, CHANCE, 0.3125, Reason.COLLAPSE),
        (10, CHANCE, 0.3126, Reason.NONE),  # its data drifted: it still predicts the old data
        (10, CHANCE, 0.6, Reason.NONE),
    ],
)
def test_a_host_that_guesses_after_learning_has_collapsed(calm, loss, expected, reason):
    governor = governor_of(calm=calm)
    assert judged(governor, [Moment(loss, expected)]) == [reason]
    assert governor.healthy.item() == (reason is Reason.NONE)


def test_a_host_that_never_learned_cannot_collapse():
    governor = governor_of()
    for _ in range(15):
        assert judged(governor, [Moment(CHANCE, 0.25)]) == [Reason.NONE]
    level = 0.6 * CHANCE
    for mean, reason in ((level * 1.01, Reason.NONE), (level * 0.99, Reason.COLLAPSE)):
        governor = governor_of()
        for _ in range(12):
            judged(governor, [Moment(mean)])
        assert judged(governor, [Moment(CHANCE, 0.25)]) == [reason]


def test_three_consecutive_strikes_are_a_runaway_and_two_are_not():
    governor, far = governor_of(calm=10), Moment(13.0)
    for count in (1, 2):
        for _ in range(count):
            assert judged(governor, [far]) == [Reason.NONE]
            assert not governor.healthy
        assert judged(governor, [CALM]) == [Reason.NONE]  # which resets the strikes
        assert governor.healthy
    assert [judged(governor, [far]) for _ in range(7)] == [
        [reason] for reason in [Reason.NONE, Reason.NONE, Reason.RUNAWAY] * 2 + [Reason.NONE]
    ]


def test_a_rollback_for_another_reason_resets_the_strikes():
    governor, far = governor_of(calm=10), Moment(13.0)
    for disaster in (Moment(NAN), Moment(CHANCE, 0.25)):
        for moment in (far, far, disaster, far, far):
            (reason,) = judged(governor, [moment])
            assert (reason is Reason.NONE) == (moment is far)
        judged(governor, [CALM])


@pytest.mark.parametrize(
    ("losses", "loss", "strike"),
    [
        ([0.5] * 10, 12.01, True),
        ([0.5] * 10, 11.99, False),  # not above 12 nats
        ([5.0] * 10, 15.01, True),
        ([5.0] * 10, 14.99, False),  # not above three times the mean
        ([0.0, 4.0] * 5, 14.01, True),
        ([0.0, 4.0] * 5, 13.99, False),  # not above the mean plus six deviations
        ([0.5] * 9, 40.0, False),  # the history is too short
    ],
)
def test_each_condition_of_a_runaway_is_required(losses, loss, strike):
    governor = governor_of()
    for before in losses:
        judged(governor, [Moment(before)])
    judged(governor, [Moment(loss)])
    assert governor.strikes.item() == int(strike)
    assert governor.healthy.item() != strike


def test_the_history_holds_only_the_last_twenty_healthy_losses():
    governor = governor_of()
    healthy = [0.5 + i / 64 for i in range(30)]
    for i, loss in enumerate(healthy):
        judged(governor, [Moment(loss)])
        before = history(governor)
        anomalies = [Moment(NAN), Moment(INF), Moment(0.5, host_norm=NAN)]
        if i >= 10:
            anomalies += [Moment(50.0), Moment(CHANCE, 0.25)]
        for anomaly in anomalies:
            judged(governor, [anomaly])
            assert history(governor) == before
    assert history(governor) == healthy[-20:]


# --- against the oracle -----------------------------------------------------------------------

calm_moments = st.sampled_from([CALM, Moment(0.25), Moment(0.75, 0.25), Moment(0.125)])
any_moments = st.sampled_from([
    CALM, Moment(0.25), Moment(1.375, 0.25), Moment(1.375, 0.3125), Moment(1.375, 0.5),
    Moment(13.0), Moment(13.0), Moment(40.0), Moment(NAN), Moment(INF),
    Moment(0.5, train_loss=NAN), Moment(0.5, host_norm=INF), Moment(13.0, seed_norm=NAN),
    Moment(13.0, seed_norm=INF, computing=False),
])  # fmt: skip
lives = st.tuples(
    st.lists(calm_moments, min_size=8, max_size=12), st.lists(any_moments, min_size=24, max_size=24)
).map(lambda parts: (parts[0] + parts[1])[:32])


@settings(max_examples=examples(40))
@given(st.lists(lives, min_size=3, max_size=3), st.integers(0, 2**20))
def test_judgements_and_rollbacks_match_one_governor_per_host(rows: list[list[Moment]], seed: int):
    stack = random_stack(HOST, len(rows), torch.float32, seed)
    governor = Governor(stack, CLASSES)
    oracles = [NaiveGovernor(CLASSES, kept=_kept(stack, n)) for n in range(len(rows))]
    generator = torch.Generator().manual_seed(seed)
    for t, moments in enumerate(zip(*rows, strict=True)):
        _train(stack, generator)
        before = [row_of(stack, n) for n in range(len(rows))]
        reasons = judged(governor, list(moments))
        assert reasons == [
            oracle.check(moment.loss, moment.others, moment.expected)
            for oracle, moment in zip(oracles, moments, strict=True)
        ]
        rolled = torch.tensor([reason is not Reason.NONE for reason in reasons])
        governor.restore(rolled)
        if t % 3 == 0:
            governor.snapshot(governor.healthy)
        for n, oracle in enumerate(oracles):
            assert governor.strikes[n].item() == oracle.strikes
            assert governor.healthy[n].item() == oracle.healthy
            assert history(governor, n) == oracle.history
            if t % 3 == 0 and oracle.healthy:
                oracle.kept = _kept(stack, n)
            expected = before[n]
            if rolled[n]:
                forgotten = {name: torch.zeros_like(part) for name, part in expected.items()}
                expected = forgotten | oracle.kept
            assert_identical(row_of(stack, n), expected)


def _kept(stack: Stack, n: int) -> dict[str, Tensor]:
    """The parts of a host in a snapshot: parameters and statistics, no optimizer state."""
    return {
        name: part
        for name, part in row_of(stack, n).items()
        if name in ("host", "statistics") or name in [f"seed {s}" for s in range(SLOTS)]
    }


def _train(stack: Stack, generator: torch.Generator) -> None:
    """Change every value of the stack."""
    optimizers = [stack.host_optimizer, *stack.seed_optimizers]
    moments = [part for state in optimizers for part in (state.first, state.second, state.step)]
    for part in (stack.host, stack.buffers, *stack.seeds, *moments):
        part.add_(torch.rand(part.shape, generator=generator, device=CPU))


# --- snapshots --------------------------------------------------------------------------------


def test_the_first_snapshot_is_of_newborn_hosts():
    stack = random_stack(HOST, 2, torch.float32)
    born = _kept(stack, 0)
    governor = Governor(stack, CLASSES)
    _train(stack, torch.Generator().manual_seed(1))
    governor.restore(torch.tensor([True, False]))
    assert_identical(_kept(stack, 0), born)


def test_a_snapshot_of_an_unhealthy_host_updates_only_its_seeds():
    """After a rollback a just fossilised seed must exist and its host must be healthy."""
    governor = governor_of(2, calm=10)
    stack = governor.stack
    sane = [_kept(stack, n) for n in range(2)]
    _train(stack, torch.Generator().manual_seed(1))
    now = [_kept(stack, n) for n in range(2)]
    judged(governor, [Moment(13.0), CALM])
    governor.snapshot(torch.tensor([True, True]))
    _train(stack, torch.Generator().manual_seed(2))
    governor.restore(torch.tensor([True, True]))
    seeds = {name: part for name, part in now[0].items() if name.startswith("seed")}
    assert_identical(_kept(stack, 0), sane[0] | seeds)
    assert_identical(_kept(stack, 1), now[1])
