"""Exported networks give the same logits, in this process and in one without Esper."""

import logging
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from esper.kasmina.hosts.host import Host
from esper.leyline.actions import Style
from esper.leyline.stages import Stage
from esper.tolaria.backends.choice import torch_backend
from esper.tolaria.export import (
    committed_seeds,
    export_program,
    grown_network,
    onnx_bytes,
    pt2_bytes,
)
from esper.tolaria.precision import Precision
from residual_hosts import gardens, random_numbers, residual_host
from support import (
    F64,
    SPANNED,
    Plant,
    gardens_of,
    naive_environments,
    names_of,
    optimisation,
    random_inputs,
    random_stack,
    seed_state,
    small_gpt,
    small_host,
    small_mlp,
)

FOREIGN = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "esper":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
import torch

folder, *names = sys.argv[1:]
for name in names:
    module = torch.export.load(f"{folder}/{name}.pt2").module()
    batches = torch.load(f"{folder}/{name}-images.pt", weights_only=True)
    torch.save([module(images) for images in batches], f"{folder}/{name}-logits.pt")
assert "esper" not in sys.modules
"""


PLAIN_HOSTS = small_host(), small_mlp(), small_gpt()


def every_fossil(host: Host) -> list[dict[int, Plant]]:
    """Each blueprint in each style, with other seeds in the next slots; one slot stays empty."""
    names = names_of(host)
    whole = [
        {s: Plant(names[(i + s) % len(names)], style, alpha=(0.7, 1.0, 0.5)[s]) for s in range(3)}
        for i in range(len(names))
        for style in Style
    ]
    return [*whole[::2], *({s: p for s, p in plants.items() if s != 1} for plants in whole[1::2])]


def images_of(host: Host, count: int, dtype: torch.dtype = F64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return random_inputs(host, (count, *host.image), generator).to(dtype)


def plain(images: torch.Tensor) -> torch.Tensor:
    """Images in the layout of ordinary modules, ``[B, C, H, W]``."""
    return images.permute(0, 3, 1, 2).contiguous()


def fossils_of(host: Host) -> list[dict[int, Plant]]:
    """Every blueprint and style of a host whose slots differ, fossilised."""
    return [
        {s: replace(p, stage=Stage.FOSSILISED, frozen=False) for s, p in plants.items() if p.alpha}
        for garden in gardens_of(host, 60)
        for plants in garden
    ]


GARDENS = {
    **{host.summary.split()[0]: (host, every_fossil(host)) for host in PLAIN_HOSTS},
    **{f"wide {number}": (host, fossils_of(host)) for number, host in enumerate(SPANNED)},
}


@pytest.mark.parametrize(("host", "garden"), GARDENS.values(), ids=GARDENS)
def test_every_blueprint_and_style_matches_oracle_and_engine(
    host: Host, garden: list[dict[int, Plant]]
) -> None:
    slots = len(host.slots)
    stack, state = random_stack(host, len(garden)), seed_state(garden, slots)
    naive = naive_environments(host, stack, garden, optimisation(len(garden), slots))
    images = images_of(host, 7)
    engine = torch_backend(host, Precision("cpu")).logits(stack, committed_seeds(state), images)
    for row, environment in enumerate(naive):
        found = grown_network(host, stack, state, row)(plain(images))
        expected = environment.host.eval()(plain(images), environment.seeds)
        torch.testing.assert_close(found, expected.view_as(found), rtol=0, atol=1e-12)
        torch.testing.assert_close(found, engine[row], rtol=0, atol=1e-12)


def test_a_user_module_is_exported_as_a_copy_with_its_seeds() -> None:
    host = residual_host()
    for garden in gardens(14):
        stack, state = random_numbers(host, len(garden)), seed_state(garden, 4)
        images = images_of(host, 7)
        engine = torch_backend(host, Precision("cpu")).logits(stack, committed_seeds(state), images)
        for row in range(len(garden)):
            network = grown_network(host, stack, state, row)
            torch.testing.assert_close(network(plain(images)), engine[row], rtol=0, atol=1e-12)
    assert {type(network), type(host.template)} == {host.build}
    assert all(marker.grown is None for marker in host._markers.values())


@pytest.mark.parametrize("stage", [Stage.TRAINING, Stage.BLENDING, Stage.HOLDING])
def test_seeds_that_are_not_fossilised_are_not_exported(stage: Stage) -> None:
    host = small_host()
    alpha = 0.0 if stage is Stage.TRAINING else 0.8
    garden = [
        {0: Plant("conv_light", stage=stage, alpha=alpha), 2: Plant("norm")},
        {2: Plant("norm")},
    ]
    stack, state = random_stack(host, 2), seed_state(garden, 3)
    for store in (stack.host, stack.buffers, stack.seeds[2]):
        store[1] = store[0]
    images = plain(images_of(host, 5))
    with_it, without = (grown_network(host, stack, state, row) for row in (0, 1))
    assert torch.equal(with_it(images), without(images))
    assert with_it.state_dict().keys() == without.state_dict().keys()
    assert "seeds.r0c1.norm.weight" in with_it.state_dict()


HOSTS = {
    "cnn": (small_host(), {0: Plant("conv_heavy"), 2: Plant("attention", Style.GATED_GATE)}),
    "mlp": (small_mlp(), {0: Plant("mlp", Style.LINEAR_MULTIPLY), 1: Plant("mlp_small")}),
    "wide": (SPANNED[0], {2: Plant("conv_heavy"), 4: Plant("conv_small", Style.GATED_GATE)}),
    "gpt": (small_gpt(), {0: Plant("attention", Style.GATED_GATE), 2: Plant("norm")}),
    "module": (residual_host(), {0: Plant("bottleneck"), 3: Plant("mlp", Style.GATED_GATE)}),
}


def case(name: str) -> tuple[Host, nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
    """A host with seeds: the exported module, and the logits of the engine."""
    host, plants = HOSTS[name]
    make = random_numbers if name == "module" else random_stack
    state, stack = seed_state([plants], len(host.slots)), make(host, 1, torch.float32)
    backend = torch_backend(host, Precision("cpu"))

    def engine(images: torch.Tensor) -> torch.Tensor:
        return backend.logits(stack, committed_seeds(state), images)[0]

    return host, grown_network(host, stack, state, 0), engine


def test_exported_files_give_equal_logits_without_esper(tmp_path: Path) -> None:
    counts = (1, 2, 33)
    for name in HOSTS:
        host, network, _ = case(name)
        content = pt2_bytes(export_program(network, host.image))
        assert str(Path(__file__).parents[2]).encode() not in content
        (tmp_path / f"{name}.pt2").write_bytes(content)
        batches = [plain(images_of(host, count, torch.float32)) for count in counts]
        torch.save(batches, tmp_path / f"{name}-images.pt")
    command = [sys.executable, "-c", FOREIGN, str(tmp_path), *HOSTS]
    subprocess.run(command, check=True)
    for name in HOSTS:
        host, _, engine = case(name)
        for count, found in zip(counts, torch.load(tmp_path / f"{name}-logits.pt"), strict=True):
            expected = engine(images_of(host, count, torch.float32))
            assert expected.isfinite().all()
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "cnn" else [pytest.mark.slow]) for n in HOSTS]
)
def test_onnx_runtime_gives_equal_logits(name: str) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    host, network, engine = case(name)
    session = onnxruntime.InferenceSession(onnx_bytes(export_program(network, host.image)))
    assert logging.root.manager.disable == logging.NOTSET
    for count in (1, 5):
        images = images_of(host, count, torch.float32)
        (found,) = session.run(["logits"], {"images": plain(images).numpy()})
        np.testing.assert_allclose(found, engine(images).numpy(), 0, 1e-5, equal_nan=False)


def test_committed_seeds_are_fossilised_and_act() -> None:
    stages = (Stage.FOSSILISED, Stage.FOSSILISED, Stage.BLENDING)
    zeros = torch.zeros(1, 3, dtype=torch.int64)
    state: Any = SimpleNamespace(
        stage=torch.tensor([[int(stage) for stage in stages]]),
        alpha=torch.tensor([[0.7, 0.0, 0.5]]),
        blueprint=zeros, style=zeros, frozen=zeros.bool(),
    )  # fmt: skip
    seeds = committed_seeds(state)
    assert [x.tolist() for x in (seeds.computed, seeds.alpha)] == [
        [[True, False, False]],
        [[pytest.approx(0.7), 0.0, 0.0]],
    ]
