"""Transformers on text: compared with modules in fp64; causality; independence."""

from itertools import product

import pytest
import test_independence as independence
import test_measure_oracle as measuring
import torch
from test_operation_count import counted
from test_training_oracle import check
from torch import Tensor

from esper.kasmina.hosts.transformer import TransformerHost
from esper.leyline.actions import Style
from esper.tolaria.backends.torch import TorchBackend
from esper.tolaria.plan import CHUNK, Seeds
from esper.tolaria.precision import Precision
from support import (
    LIVES,
    SEQUENCE_NAMES,
    Garden,
    Plant,
    assert_same_environment,
    every_plant,
    mixed_gardens,
    naive_environments,
    optimisation,
    planted,
    random_batches,
    random_stack,
    seed_state,
    small_gpt,
    train,
    train_naively,
)

HOST = small_gpt()
MIXED = mixed_gardens(3, 16, SEQUENCE_NAMES)
every_backend = pytest.mark.usefixtures("backend")


def test_mixed_gardens_contain_every_plant():
    grown = {plant for garden in MIXED for plants in garden for plant in plants.values()}
    assert grown == set(every_plant(SEQUENCE_NAMES))


@every_backend
@pytest.mark.parametrize(("layers", "width", "heads"), [(1, 4, 1), (2, 6, 3), (2, 3, 0)])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_bare_transformer_trains_like_its_module(layers: int, width: int, heads: int, rows: int):
    check(small_gpt(layers=layers, width=width, heads=heads), [{} for _ in range(rows)])


@every_backend
@pytest.mark.parametrize("garden", MIXED, ids=lambda garden: f"{len(garden)} environments")
def test_seeds_of_every_kind_train_like_their_modules(garden: Garden):
    check(HOST, garden)


@every_backend
@pytest.mark.parametrize("width", [3, 6, 36])
def test_seeds_of_slots_of_any_width_train_like_their_modules(width: int):
    host = small_gpt(layers=1, width=width, heads=1, context=3)
    check(host, [{0: Plant(name, Style.GATED_GATE)} for name in SEQUENCE_NAMES], batch=3)


@every_backend
@pytest.mark.parametrize(("context", "width"), [(7, 20), (18, 16)])
def test_minibatches_of_any_size_train_like_their_modules(context: int, width: int):
    """More sequences, bytes and channels than a register has lanes, and fewer."""
    host = small_gpt(layers=1, width=width, heads=2, context=context, classes=19)
    for batch in (1, 17):
        check(host, [{}, {0: Plant("attention", Style.LINEAR_MULTIPLY, alpha=0.3)}], batch=batch)


@every_backend
def test_attention_with_large_scores_trains_like_its_module():
    """Whose exponentials overflow, unless the largest score is subtracted first."""
    host, rows = small_gpt(width=8), 2
    stack, batches = random_stack(host, rows), random_batches(host, rows, count=1)
    for name, weights in host.layout.views(stack.host).items():
        if name.endswith("joint.weight"):
            weights.mul_(100.0)
    settings = optimisation(rows, len(host.slots))
    environments = naive_environments(host, stack, [{}] * rows, settings)
    train(host, stack, seed_state([{}] * rows, len(host.slots)), batches, settings)
    train_naively(environments, batches)
    for n, environment in enumerate(environments):
        assert_same_environment(host, stack, n, environment)


@every_backend
def test_more_seeds_of_a_kind_than_fit_one_chunk_train_like_their_modules():
    host = small_gpt(slot_names=("r0c1",))
    check(host, [{0: Plant("attention", alpha=0.5)} for _ in range(CHUNK + 2)], batch=2)


@every_backend
def test_sgd_trains_transformers_and_seeds_like_their_modules():
    check(HOST, MIXED[0][:4], momentum=0.9)


@every_backend
@pytest.mark.parametrize("split", ["validation", "test"])
def test_scores_ablations_and_commitments_match_the_modules(split: str):
    garden = [plants for part in MIXED for plants in part][:40:4]
    measuring.check(planted(HOST, garden), garden, split)


def logits(host: TransformerHost, garden: Garden, inputs: Tensor) -> Tensor:
    """Logits ``[N, B, T, classes]`` of ``inputs [B, 1, T, N, 1]``."""
    stack, seeds = random_stack(host, len(garden)), Seeds.acting(seed_state(garden, 3))
    backend = TorchBackend(host, Precision("cpu"))
    out = backend._forward(backend._read(stack, seeds, None), inputs)
    return out.unflatten(1, (len(inputs), host.context))


@pytest.mark.parametrize("position", range(HOST.context))
def test_no_position_depends_on_a_later_byte(position: int):
    """With every blueprint in every style, and without any."""
    kinds = list(product(SEQUENCE_NAMES, Style))
    garden: Garden = [{}, *({s: Plant(*kind) for s in range(3)} for kind in kinds)]
    (inputs, _), *_ = random_batches(HOST, len(garden), count=1, size=2)
    changed = inputs.clone()
    changed[:, :, position] = (changed[:, :, position] + 1) % HOST.classes
    before, after = logits(HOST, garden, inputs), logits(HOST, garden, changed)
    assert torch.equal(before[:, :, :position], after[:, :, :position])
    assert (before[:, :, position:] != after[:, :, position:]).flatten(3).any(3).all()


def other_bytes(stack, batches: list[tuple[Tensor, Tensor]]) -> None:
    for inputs, labels in batches:
        others = independence.neighbours(stack.host)
        inputs[:, :, :, others] = (inputs[:, :, :, others] + 1) % HOST.classes
        labels[others] = 0


DISTURBANCES = (
    independence.other_hosts, independence.other_seeds, independence.nan_hosts,
    independence.nan_seeds, independence.overflowing_hosts, other_bytes,
)  # fmt: skip


@every_backend
@independence.every_dtype
@pytest.mark.parametrize("garden", independence.gardens(HOST), ids=SEQUENCE_NAMES)
def test_results_are_bitwise_independent_of_other_environments(garden: Garden, dtype: torch.dtype):
    independence.assert_independent(HOST, garden, DISTURBANCES, dtype)


@every_backend
@pytest.mark.parametrize("name", SEQUENCE_NAMES)
def test_an_isolated_seed_with_nan_does_not_affect_its_host(name: str):
    garden: Garden = [{1: Plant(name, style, **LIVES["training"])} for style in Style]
    clean, sick = random_stack(HOST, 4), random_stack(HOST, 4)
    sick.seeds[1][:] = float("nan")
    batches = random_batches(HOST, 4, count=2)
    for stack in (clean, sick):
        train(HOST, stack, seed_state(garden, 3), batches)
    assert torch.equal(clean.host, sick.host)


@every_backend
def test_any_subset_of_environments_gives_the_same_results():
    independence.assert_same_in_any_subset(HOST, "attention")


COMPOSITION: Garden = [
    {0: Plant("attention"), 1: Plant("mlp", Style.GATED_GATE, **LIVES["training"])},
    {0: Plant("norm", Style.LINEAR_MULTIPLY, **LIVES["blending"]), 1: Plant("lora")},
]


def test_more_transformers_take_no_more_operations():
    pairs = [COMPOSITION[i] for i in (0, 0, 1, 1)]
    counted(HOST, pairs)  # fills caches of the device, which are not part of a step
    few = counted(HOST, pairs)
    assert few.computing > 100
    assert counted(HOST, COMPOSITION * 6) == counted(HOST, [*COMPOSITION, {}] * 4) == few
    bare = counted(HOST, [{}] * 4)
    assert counted(HOST, [{}] * 64) == bare
    assert bare.computing < few.computing
