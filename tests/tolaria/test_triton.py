"""The Triton backend, under the interpreter, beside the torch backend in float64."""

import logging
from importlib.util import find_spec

import pytest
import torch

from esper.kasmina.hosts.host import Host
from esper.native import library
from esper.tolaria.backends import Backend, HeldBack
from esper.tolaria.backends.choice import choose_backend
from esper.tolaria.backends.torch import TorchBackend
from esper.tolaria.plan import Seeds
from esper.tolaria.precision import Precision
from support import (
    CPU,
    F64,
    MLP_NAMES,
    SPANNED,
    Garden,
    gardens_of,
    mixed_gardens,
    optimisation,
    random_batches,
    random_stack,
    seed_state,
    small_gpt,
    small_host,
    small_mlp,
    train,
)

FULL = Precision("cpu")
CNNS, MLPS = mixed_gardens(slots=3, rows=6), mixed_gardens(3, 6, MLP_NAMES)
CASES = [(small_host(), CNNS[0]), (small_mlp(), MLPS[0])]
CASES.append((SPANNED[0], gardens_of(SPANNED[0], 4)[0]))
OTHERS = [(small_host(), garden) for garden in CNNS[1:]]

interpreted = pytest.mark.skipif(
    find_spec("triton") is None or torch.cuda.is_available(),
    reason="needs Triton's interpreter, on a machine without a GPU",
)


def trained(backend: Backend, host: Host, garden: Garden, dtype: torch.dtype) -> list[torch.Tensor]:
    """Stores and scores after an epoch of two minibatches; SGD keeps rounding errors small."""
    rows, slots = len(garden), len(host.slots)
    stack, state = random_stack(host, rows, dtype), seed_state(garden, slots)
    settings = optimisation(rows, slots, dtype=dtype, momentum=0.9)
    batches = random_batches(host, rows, count=2, dtype=dtype)
    result = train(host, stack, state, batches, settings, backend)
    images = random_batches(host, 1, count=1, size=7, dtype=dtype)[0][0][:, :, :, 0]
    labels = torch.zeros(1, 7, dtype=torch.long)
    held_back = HeldBack(images[None], labels, torch.zeros(rows, dtype=torch.long))
    scores, _ = backend.evaluate(stack, Seeds.training(state), held_back, [])
    measures = result.slots.nan_to_num(-1.0)
    parts = [stack.host, stack.buffers, *stack.seeds, result.loss, scores.loss, measures]
    return [part.double() for part in parts]


@interpreted
@pytest.mark.parametrize(
    ("host", "garden"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)]
)
def test_hosts_and_seeds_train_as_in_float64(host: Host, garden: Garden) -> None:
    backend = choose_backend("triton", host, FULL, torch.float32, CPU)
    assert backend.name == "triton"
    exact = trained(TorchBackend(host, FULL), host, garden, F64)
    mine = trained(backend, host, garden, torch.float32)
    for part, reference in zip(mine, exact, strict=True):
        assert float((part - reference).norm()) <= 1e-5 * max(1.0, float(reference.norm()))


@pytest.mark.parametrize(
    ("host", "dtype", "interpreter", "reason"),
    [
        (small_host(), torch.float32, "0", "a CUDA device only"),
        (small_host(), F64, "1", "no float64"),
        (small_gpt(), torch.float32, "1", "no kernels for hosts without BatchNorm"),
    ],
)
def test_torch_replaces_it_with_a_reason_where_it_cannot_compute(
    host: Host,
    dtype: torch.dtype,
    interpreter: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    library.fall_back.cache_clear()
    monkeypatch.setenv("TRITON_INTERPRET", interpreter)
    with caplog.at_level(logging.WARNING):
        backend = choose_backend("triton", host, FULL, dtype, CPU)
    assert backend.name == "torch"
    assert caplog.messages[0].startswith("triton backend: ")
    assert reason in caplog.messages[0]
    assert caplog.messages[0].endswith("; using torch")
