"""Features: each value is at the index of its name; empty slots have no seed features."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from esper.kasmina.hosts.cnn import CnnHost
from esper.kasmina.seeds import AlphaMode, SeedSignals, SeedState
from esper.kasmina.slots import SlotSpec
from esper.leyline.actions import Op, Style
from esper.leyline.stages import Stage
from esper.simic.growth.agent import GrowthMoments
from esper.tamiyo.policy.features import (
    CRITIC_FEATURES,
    EMPTY_SLOT_SIGNALS,
    HISTORY,
    HOST_FEATURES,
    MIN_PRICE,
    SIZE_FEATURES,
    SLOT_FEATURES,
    Observation,
    Progress,
    critic_features,
    host_features,
    log_price,
    log_size,
    slot_features,
    symlog,
)
from esper.tolaria.results import SLOT_MEASURES
from synthetic import random_observation

CPU = torch.device("cpu")
NAN = math.nan


def progress_of(count: int, **changes) -> Progress:
    known = {
        "step": 10, "episode_length": 40,
        "losses": torch.arange(count * (HISTORY + 1)).float().view(count, -1) + 1.0,
        "expected": torch.linspace(0.0, 1.0, count * (HISTORY + 1)).view(count, -1),
        "train_loss": torch.full((count,), 2.0), "train_accuracy": torch.full((count,), 0.25),
        "slot_measures": torch.full((count, 1, len(SLOT_MEASURES)), NAN),
        "last_op": torch.full((count,), int(Op.ADVANCE)), "success": torch.ones(count).bool(),
        "rolled_back": torch.zeros(count).bool(), "log_price": torch.zeros(count),
        "deadline": torch.ones(count, dtype=torch.float64),
    }  # fmt: skip
    return Progress(**(known | changes))


def named(features: Tensor, names: tuple[str, ...]) -> dict[str, float]:
    return dict(zip(names, features.tolist(), strict=True))


def state_of(stages: list[Stage], **columns) -> SeedState:
    """One environment with slots in these stages."""
    state = SeedState.dormant((1, len(stages)), CPU)
    state.stage[0] = torch.tensor(stages)
    for name, values in columns.items():
        getattr(state, name)[0] = torch.tensor(values)
    return state


def test_host_features_match_their_names() -> None:
    state = state_of([Stage.TRAINING, Stage.BLENDING, Stage.FOSSILISED, Stage.DORMANT])
    progress = progress_of(
        1, rolled_back=torch.tensor([True]), success=torch.tensor([False]),
        log_price=log_price(torch.tensor([0.1])),
    )  # fmt: skip
    parameters = torch.tensor([[100, 50, 50, 0]])
    found = named(host_features(progress, state, 400, parameters, 3)[0], HOST_FEATURES)
    expected = {
        "progress": 0.25, "remaining": 0.75, "validation_loss": math.log(1.0 + 6.0),
        "expected_accuracy": 1.0, "loss_history_0": math.log(1.0 + 1.0),
        f"loss_history_{HISTORY - 1}": math.log(1.0 + 5.0), "accuracy_history_0": 0.0,
        f"accuracy_history_{HISTORY - 1}": 0.8, "train_loss": math.log(3.0), "train_accuracy": 0.25,
        "share_training": 0.25, "share_blending": 0.25, "share_kept": 0.25, "action_success": 0.0,
        "last_advance": 1.0, "last_wait": 0.0, "last_prune": 0.0,
        "log_host_parameters": math.log(0.4) / 2.0, "log_growth": math.log(1.5), "budget_left": 0.0,
        "rolled_back": 1.0, "log_price": math.log(2.0),
    }  # fmt: skip
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=1e-6), name


def test_the_price_feature_is_finite_and_rises_with_the_price() -> None:
    found = log_price(torch.tensor([0.0, 0.01, 0.05, 0.3], dtype=torch.float64))
    assert found.dtype == torch.float32
    assert found.isfinite().all()
    assert found.tolist() == sorted(found.tolist())
    assert found[2] == pytest.approx(0.0, abs=1e-6)


def test_unknown_host_features_are_minus_one() -> None:
    nothing = torch.full((1, HISTORY + 1), NAN)
    progress = progress_of(
        1, losses=nothing, expected=nothing, train_loss=torch.tensor([NAN]),
        train_accuracy=torch.tensor([NAN]),
    )  # fmt: skip
    state = state_of([Stage.DORMANT])
    found = named(host_features(progress, state, 9, torch.zeros(1, 1), 1)[0], HOST_FEATURES)
    for name in ("validation_loss", "expected_accuracy", "train_loss", "train_accuracy"):
        assert found[name] == -1.0
    for i in range(HISTORY):
        assert found[f"loss_history_{i}"] == found[f"accuracy_history_{i}"] == -1.0


def described(
    state: SeedState, signals: SeedSignals | None = None, measures: Tensor | None = None
) -> list[dict[str, float]]:
    """Features by name for every slot of the single environment."""
    slots = state.stage.shape[1]
    host = CnnHost(channels=(3, 5, 7)[:slots], classes=10, image=(8, 8, 1))
    unknown = SeedSignals.unknown((1, slots), CPU)
    parameters = torch.where(state.living, 60, 0)
    if measures is None:
        measures = torch.full((1, slots, len(SLOT_MEASURES)), NAN)
    features = slot_features(host.slots, 40, state, signals or unknown, 120, parameters, measures)
    return [named(row, SLOT_FEATURES) for row in features[0]]


def test_slot_features_match_their_names() -> None:
    state = state_of(
        [Stage.DORMANT, Stage.BLENDING, Stage.EMBARGOED], alpha=[0.0, 0.4, 0.0],
        alpha_velocity=[0.0, 0.1, 0.0], goal=[0.0, 0.7, 0.0], ramp_target=[0.0, 0.5, 0.0],
        ramp_mode=[0, int(AlphaMode.UP), 0], ramp_steps=[0, 8, 0], ramp_done=[0, 4, 0],
        tempo=[0, 5, 0], style=[0, int(Style.GATED_GATE), 0], age=[0, 20, 0], stage_age=[0, 2, 1],
    )  # fmt: skip
    signals = replace(
        SeedSignals.unknown((1, 3), CPU), contribution=torch.tensor([[NAN, 0.03, NAN]]),
        contribution_velocity=torch.tensor([[0.0, -0.02, 0.0]]),
        health=torch.tensor([[NAN, 0.9, NAN]]), gradient_norm=torch.tensor([[NAN, 4.0, NAN]]),
        exploding=torch.tensor([[False, True, False]]),
    )  # fmt: skip
    found = described(state, signals)[1]
    expected = {
        "occupied": 1.0, "stage_blending": 1.0, "stage_dormant": 0.0, "alpha": 0.4,
        "alpha_velocity": 0.1, "alpha_goal": 0.7, "ramp_target": 0.5, "ramp_up": 1.0,
        "ramp_down": 0.0, "ramp_steps": 0.2, "ramp_done": 0.1, "tempo": 0.125,
        "style_gated_gate": 1.0, "style_linear_add": 0.0, "contribution": 0.3,
        "contribution_velocity": -0.2, "contribution_known": 1.0, "gradient_norm": math.log(5.0),
        "gradient_health": 0.9, "previous_health": -1.0, "exploding": 1.0, "age": 0.5,
        "stage_age": 0.05, "log_seed_share": math.log(1.5), "depth": 2 / 3,
        "log_channels": math.log(5.0 / 16.0),
    }  # fmt: skip
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=1e-6), name


@pytest.mark.parametrize("stage", [Stage.DORMANT, Stage.PRUNED, Stage.EMBARGOED, Stage.RESETTING])
def test_an_unmeasured_empty_slot_has_only_stage_and_place_features(stage) -> None:
    state = state_of([stage], alpha=[0.3], tempo=[5], style=[2], age=[7], stage_age=[3], goal=[0.5])
    signals = replace(SeedSignals.unknown((1, 1), CPU), contribution=torch.tensor([[0.5]]))
    found = described(state, signals)[0]
    told = {name for name, value in found.items() if value != 0.0}
    assert told == {f"stage_{stage.name.lower()}", "depth", "log_channels"}


@pytest.mark.parametrize("stage", [Stage.DORMANT, Stage.EMBARGOED])
def test_a_measured_empty_slot_shows_logarithms(stage) -> None:
    values = [math.exp(-3.0 - i) for i in range(len(SLOT_MEASURES))]
    values[SLOT_MEASURES.index("active_share")] = 0.7
    values[SLOT_MEASURES.index("gain_linear")] = NAN
    values[SLOT_MEASURES.index("gain_norm")] = 0.0
    found = described(state_of([stage]), measures=torch.tensor([[values]]))[0]
    told = {name: found[name] for name in EMPTY_SLOT_SIGNALS}
    assert told == pytest.approx(
        {
            "slot_known": 1.0, "log_slot_gradient": -3.0 / 5.0,
            "log_slot_gradient_ratio": -4.0 / 5.0, "log_slot_activation": -5.0 / 5.0,
            "active_share": 0.7, "log_gain_scale": -7.0 / 5.0,
            "log_gain_norm": math.log(1e-12) / 5.0, "log_gain_linear": 0.0,
            "log_gain_pointwise": -10.0 / 5.0, "log_gain_spatial": -11.0 / 5.0,
            "log_gain_hidden": -12.0 / 5.0,
        },
        abs=1e-6,
    )  # fmt: skip


def test_signals_of_empty_slots_are_0_with_a_seed_or_without_a_finite_gradient() -> None:
    measures = torch.full((1, 3, len(SLOT_MEASURES)), 0.5)
    measures[0, 1, 0] = math.inf
    state = state_of([Stage.GERMINATED, Stage.DORMANT, Stage.DORMANT])
    seeded, overflowed, known = described(state, measures=measures)
    for name in EMPTY_SLOT_SIGNALS:
        assert seeded[name] == overflowed[name] == 0.0 != known[name]


SIZES = [10**exponent for exponent in range(2, 9)]


def size_features(size: int, added: int) -> dict[str, float]:
    """The size features of a host whose single slot has as many channels as fit into it."""
    state, parameters = state_of([Stage.HOLDING]), torch.tensor([[added]])
    slot = SlotSpec("r0c0", max(1, size // 100), (8, 8), 1.0)
    unknown = SeedSignals.unknown((1, 1), CPU)
    progress = progress_of(1, log_price=log_price(torch.tensor([1.0 / size])))
    host = host_features(progress, state, size, parameters, 1)
    measures = torch.full((1, 1, len(SLOT_MEASURES)), NAN)
    slots = slot_features((slot,), 40, state, unknown, size, parameters, measures)
    moments = GrowthMoments(CPU)
    # A run on hosts of 438 parameters in which nothing about sizes varies.
    seen = replace(
        random_observation((4,), 1, 0),
        host=torch.full((4, len(HOST_FEATURES)), log_size(438)),
        slots=torch.zeros(4, 1, len(SLOT_FEATURES)),
    )
    moments.update(seen, None)
    observed = moments.normalise(replace(seen, host=host, slots=slots))
    found = named(observed.host[0], HOST_FEATURES) | named(observed.slots[0, 0], SLOT_FEATURES)
    return {name: found[name] for name in SIZE_FEATURES}


@pytest.mark.parametrize("name", SIZE_FEATURES)
def test_size_features_tell_hosts_of_every_size_apart_after_normalisation(name: str) -> None:
    """Hosts of 100 to 100 million parameters, with a seed of 100 parameters."""
    found = [size_features(size, 100)[name] for size in SIZES]
    order = sorted(found, reverse=name in ("log_growth", "log_seed_share", "log_price"))
    assert found == order
    prices = len([size for size in SIZES if 1.0 / size >= MIN_PRICE])
    assert len(set(found)) == (prices if name == "log_price" else len(SIZES))


@pytest.mark.parametrize("name", ["log_growth", "log_seed_share"])
@pytest.mark.parametrize("size", [10**2, 10**8])
def test_growth_features_tell_every_growth_apart(size: int, name: str) -> None:
    """From a millionth of the host to ten thousand times its size."""
    added = [int(size * share) for share in (1e-6, 1e-3, 0.1, 1.0, 100.0, 1e4) if size * share >= 1]
    found = [size_features(size, count)[name] for count in added]
    expected = [math.log1p(count / size) for count in added]
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("stage", Stage)
def test_exactly_one_stage_feature_is_set(stage) -> None:
    found = described(state_of([stage]))[0]
    told = [name for name, value in found.items() if name.startswith("stage_") and value == 1.0]
    assert told == [f"stage_{stage.name.lower()}"]


def test_slot_features_are_always_finite() -> None:
    state = state_of([Stage.TRAINING, Stage.HOLDING])
    signals = replace(
        SeedSignals.unknown((1, 2), CPU), gradient_norm=torch.tensor([[math.inf, NAN]])
    )
    for slot in described(state, signals):
        assert all(math.isfinite(value) for value in slot.values())


def test_the_critic_sees_the_twin_and_the_gain() -> None:
    seen = critic_features(torch.tensor([0.6, 0.5]), torch.tensor([0.5, 0.5]))
    assert CRITIC_FEATURES == ("twin_score", "gain", "known")
    torch.testing.assert_close(seen, torch.tensor([[0.5, 1.0, 1.0], [0.5, 0.0, 1.0]]))
    assert torch.equal(critic_features(torch.tensor([0.6]), None), torch.zeros(1, 3))


def test_symlog_is_odd_and_logarithmic_for_large_values() -> None:
    x = torch.tensor([-1e6, -1.0, 0.0, 1e-4, 1e6])
    expected = torch.tensor([-math.log(1e6 + 1), -math.log(2), 0.0, 1e-4, math.log(1e6 + 1)])
    torch.testing.assert_close(symlog(x), expected)


def test_an_observation_round_trips_through_its_tensors() -> None:
    state = state_of([Stage.DORMANT, Stage.TRAINING])
    masks = {"mask_slots": torch.ones(1, 6, 2).bool(), "mask_kinds": torch.ones(1, 2, 13).bool()}
    tensors = {
        "host": torch.rand(1, len(HOST_FEATURES)),
        "slots": torch.rand(1, 2, len(SLOT_FEATURES)),
        "blueprints": state.blueprint,
        "critic": torch.rand(1, 3),
    } | masks
    again = Observation.from_tensors(tensors).tensors()
    assert again.keys() == tensors.keys()
    assert all(again[name] is tensors[name] for name in tensors)
