"""Mixed precision: when it is on, dtypes of operations, independence of environments."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_independence import DISTURBANCES, ROWS, SUBJECT, Disturbance
from torch import Tensor

from esper.kasmina import blueprints, ops
from esper.kasmina.blueprints import Blueprint
from esper.kasmina.hosts.host import Host
from esper.kasmina.stack import zeros
from esper.leyline.actions import HEADS, Style
from esper.simic.growth.environment import GrowthEnv
from esper.tolaria import precision as precision_module
from esper.tolaria.backends import HeldBack, choice
from esper.tolaria.backends.choice import precision_after_trial
from esper.tolaria.backends.torch import TorchBackend, cross_entropy
from esper.tolaria.governor import Reason
from esper.tolaria.plan import Seeds
from esper.tolaria.precision import Precision, resolve_precision
from esper.tolaria.results import EpochResult
from esper.tolaria.stores import Stack
from support import (
    CPU,
    LIVES,
    Garden,
    Plant,
    assert_identical,
    names_of,
    optimisation,
    own_blueprints,
    random_batches,
    random_stack,
    row_of,
    seed_state,
    small_environments,
    small_host,
    small_mlp,
    small_task,
    train,
)

CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)
DEVICES = pytest.mark.parametrize("device", ["cpu", CUDA])
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"]
)
NAN = float("nan")
F32 = torch.float32
ODD = small_host(image=(4, 4, 3), channels=(3, 5))
"""Odd numbers of channels, on images of 2 x 2 behind the pool."""
HOSTS = {"odd": ODD, "even": small_host(channels=(4, 6)), "mlp": small_mlp()}


# When it is on.


def test_mixed_precision_is_off_by_default() -> None:
    precision = resolve_precision(False, CPU, "bfloat16", "torch")
    assert not precision.enabled
    assert precision.reason is None


@pytest.mark.parametrize("backend", ["auto", "native"])
def test_on_a_cpu_other_backends_give_the_reason(backend: str) -> None:
    precision = resolve_precision(True, CPU, "float16", backend)
    assert not precision.enabled
    assert precision.reason is not None
    assert "--backend torch" in precision.reason
    with precision.autocast():
        assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("backend", ["auto", "native"])
@pytest.mark.parametrize("name", ["auto", "bfloat16"])
def test_native_hosts_round_where_the_processor_multiplies_bfloat16(
    name: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for able in (True, False):
        monkeypatch.setattr(precision_module, "multiplies_bfloat16", lambda able=able: able)
        precision = resolve_precision(True, CPU, name, backend)
        assert precision.enabled == able
        assert (precision.reason or "--backend torch").endswith("--backend torch")


def test_native_hosts_without_wide_convolutions_are_float32() -> None:
    mixed = Precision("cpu", torch.bfloat16)
    narrow = precision_after_trial(mixed, [small_host(), small_mlp()], F32, CPU, "auto")
    assert not narrow.enabled
    assert narrow.reason == (
        "backend auto rounds only convolutions of 32 and more channels, of which there are none; "
        "use --backend torch"
    )
    wide = small_host(channels=(3, 32))
    assert precision_after_trial(mixed, [small_mlp(), wide], F32, CPU, "auto") == mixed
    assert precision_after_trial(mixed, [small_mlp()], F32, CPU) == mixed


def test_hosts_that_the_library_computes_alone_are_not_tried_with_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[Host] = []
    monkeypatch.setattr(choice, "try_host", lambda host, *_: tried.append(host))
    mixed, wide = Precision("cpu", torch.bfloat16), small_host(channels=(3, 32))
    precision_after_trial(mixed, [wide], F32, CPU, "native")
    assert tried == []
    with own_blueprints():
        blueprints.register("foreign", lambda channels: Blueprint((zeros("scale"),), max))
        foreign = small_host(channels=(3, 32))
        precision_after_trial(mixed, [foreign], F32, CPU, "native")
        precision_after_trial(mixed, [foreign], F32, CPU)
    assert tried == [foreign, foreign]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("auto", torch.bfloat16), ("bfloat16", torch.bfloat16), ("float16", torch.float16)],
)
def test_torch_on_a_cpu_supports_both_dtypes(name: str, dtype: torch.dtype) -> None:
    precision = resolve_precision(True, CPU, name, "torch")
    assert precision.amp_dtype == dtype
    assert precision.dtype_name == str(dtype).split(".")[1]
    assert precision.scales_losses == (dtype == torch.float16)
    with precision.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype


def test_an_environment_variable_disables_mixed_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, enabled in (("1", False), ("0", True), ("", True)):
        monkeypatch.setenv("ESPER_DISABLE_AMP", value)
        precision = resolve_precision(True, CPU, backend="torch")
        assert precision.enabled == enabled
        assert precision.reason == (None if enabled else "ESPER_DISABLE_AMP is set")


def test_a_cuda_device_without_bfloat16_uses_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda:0")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    assert resolve_precision(True, device).amp_dtype == torch.float16
    refused = resolve_precision(True, device, "bfloat16")
    assert not refused.enabled
    assert refused.reason is not None
    assert "--amp-dtype float16" in refused.reason
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    assert resolve_precision(True, device).amp_dtype == torch.bfloat16


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device_with_bfloat16_uses_it() -> None:
    precision = resolve_precision(True, torch.device("cuda:0"))
    assert precision.amp_dtype == torch.bfloat16
    with precision.autocast():
        product = torch.ones(2, 2, device="cuda") @ torch.ones(2, 2, device="cuda")
    assert product.dtype == torch.bfloat16


# Trial before the run.


class _NoHalf(torch.autograd.Function):
    """An operation that a device does not support in half precision."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fails: str) -> Tensor:
        ctx.fails = fails
        if fails == "forward" and x.dtype != torch.float32:
            raise RuntimeError("not implemented for 'Half'\nand more")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.fails == "backward" and gradient.dtype != torch.float32:
            raise NotImplementedError("not implemented for 'Half'\nand more")
        return gradient, None


def environment(precision: Precision) -> GrowthEnv:
    """Four environments on the device of ``precision``."""
    settings = {"seed": 2, "episode_length": 6, "batch_size": 4, "backend": "torch"}
    devices = [torch.device(precision.device_type)]
    return small_environments([small_task(small_host())], 4, precision, devices, **settings)


@DTYPES
@pytest.mark.parametrize("fails", ["forward", "backward"])
def test_unsupported_operations_are_found_before_the_run(fails: str, dtype: torch.dtype) -> None:
    def forward(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return p["scale"][:, None] * _NoHalf.apply(x, fails)

    mixed = Precision("cpu", dtype)
    with own_blueprints():
        assert environment(mixed).amp.enabled
        blueprints.register("odd_one", lambda channels: Blueprint((zeros("scale"),), forward))
        fallen = environment(mixed)
        assert not fallen.amp.enabled
        assert fallen.amp.dtype is None
        reason = fallen.precision.reason
        assert reason is not None
        assert reason.endswith("fails on cpu (not implemented for 'Half')")
        assert environment(Precision("cpu")).precision.reason is None


# Dtypes of operations.


class _Witness(torch.autograd.Function):
    """Records the dtype of a seed's computation and whether autocast is on."""

    seen: list[tuple[str, torch.dtype, bool]]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        _Witness.seen.append(("forward", x.dtype, torch.is_autocast_enabled("cpu")))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        _Witness.seen.append(("backward", gradient.dtype, torch.is_autocast_enabled("cpu")))
        return gradient


@pytest.fixture
def witness() -> Iterator[str]:
    """A blueprint that records how it is computed."""
    _Witness.seen = []

    def forward(p: dict[str, Tensor], x: Tensor) -> Tensor:
        channels = x.shape[4]
        convolved = ops.conv2d(x, x.new_ones(x.shape[3], channels, channels, 1, 1))
        return p["scale"][:, None] * _Witness.apply(convolved)

    with own_blueprints():
        blueprints.register("witness", lambda channels: Blueprint((zeros("scale"),), forward))
        yield "witness"


@DTYPES
def test_forward_and_loss_run_under_autocast_and_backward_outside(
    dtype: torch.dtype, witness: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = []

    def spied(logits: Tensor, labels: Tensor) -> Tensor:
        loss = cross_entropy(logits, labels)
        losses.append((logits.dtype, loss.dtype, torch.is_autocast_enabled("cpu")))
        return loss

    monkeypatch.setattr("esper.tolaria.backends.torch.cross_entropy", spied)
    host = small_host()
    stack = random_stack(host, 2, torch.float32)
    garden: Garden = [{0: Plant(witness)}, {}]
    trained(host, stack, garden, random_batches(host, 2, 1, dtype=torch.float32), dtype)
    assert _Witness.seen == [("forward", dtype, True), ("backward", dtype, False)]
    assert losses == [(dtype, torch.float32, True)]
    assert {part.dtype for part in row_of(stack, 0).values()} == {torch.float32}
    held_back = HeldBack(torch.ones(1, 3, 6, 6, 2), torch.zeros(1, 3, dtype=torch.long), zero(2))
    backend = TorchBackend(host, Precision("cpu", dtype))
    scores, _ = backend.evaluate(stack, Seeds.acting(seed_state(garden, 3)), held_back, [])
    assert _Witness.seen[2:] == [("forward", dtype, True)]
    assert {scores.loss.dtype, scores.expected.dtype} == {torch.float32}


@DTYPES
def test_the_mean_of_an_image_does_not_overflow(dtype: torch.dtype) -> None:
    image = torch.full((1, 8, 8, 1, 2), 2048.0, dtype=dtype)
    assert torch.equal(ops.mean_pool(image), torch.full((1, 1, 2), 2048.0, dtype=dtype))


@DTYPES
@pytest.mark.parametrize("depthwise", [False, True], ids=["grouped", "depthwise"])
def test_convolutions_match_float32_up_to_rounding(dtype: torch.dtype, depthwise: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (2, 3, 1 if depthwise else 3, 3, 3)
    x = torch.randn(4, 5, 6, 2, 3, generator=generator).to(dtype).float()
    weight = torch.randn(shape, generator=generator).to(dtype).float()
    layer = ops.depthwise_conv2d if depthwise else ops.conv2d
    found = []
    for precision in (Precision("cpu"), Precision("cpu", dtype)):
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        with precision.autocast():
            out = layer(*leaves)
        assert out.dtype == (precision.amp_dtype or torch.float32)
        found.append((out.float(), *torch.autograd.grad(out.float().square().sum(), leaves)))
    for exact, rounded in zip(*found, strict=True):
        assert rounded.dtype == torch.float32
        error = (rounded - exact).norm() / exact.norm()
        assert 0 < error < 8 * torch.finfo(dtype).eps


# Independence of environments.


def zero(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.long)


def trained(
    host: Host,
    stack: Stack,
    garden: Garden,
    batches: list[tuple[Tensor, Tensor]],
    dtype: torch.dtype | None,
    **settings: Any,
) -> EpochResult:
    """Train one epoch in place, in mixed precision unless ``dtype`` is None."""
    backend = TorchBackend(host, Precision("cpu", dtype))
    how = optimisation(len(garden), len(host.slots), dtype=torch.float32, **settings)
    return train(host, stack, seed_state(garden, len(host.slots)), batches, how, backend)


def garden_of(host: Host) -> Garden:
    """The same kinds in all environments, so that all share every call, in alternating stages."""
    names, lives = names_of(host), list(LIVES.values())
    plants = [
        {s: Plant(names[(3 * n + s) % len(names)], list(Style)[(n + s) % 4], **lives[(n + s) % 6])
         for s in range(3)}
        for n in range(len(names))
    ]  # fmt: skip
    return [plants[n // ROWS] for n in range(ROWS * len(plants))]


@DTYPES
@pytest.mark.parametrize("host", HOSTS.values(), ids=HOSTS)
def test_results_are_bitwise_independent_of_other_environments(
    host: Host, dtype: torch.dtype
) -> None:
    garden = garden_of(host)
    state = seed_state(garden, 3)
    subjects = torch.arange(SUBJECT, len(garden), ROWS)

    def lived(disturb: Disturbance | None) -> dict[str, Tensor]:
        stack = random_stack(host, len(garden), torch.float32)
        batches = random_batches(host, len(garden), 2, dtype=torch.float32)
        if disturb is not None:
            disturb(stack, batches)
        result = trained(host, stack, garden, batches, dtype)
        images = torch.linspace(-1, 1, 5 * batches[0][0][0, :, :, 0].numel())
        images = images.view(1, 5, *host.image)
        held_back = HeldBack(images, zero(5)[None], zero(len(garden)))
        scores, _ = TorchBackend(host, Precision("cpu", dtype)).evaluate(
            stack, Seeds.acting(state), held_back, []
        )
        report = {"loss": result.loss, "norm": result.host_gradient_norm, "score": scores.loss}
        report |= {"seed norms": result.seed_gradient_norm.nan_to_num(-1.0)}
        report = {name: part[subjects] for name, part in report.items()}
        return report | {
            f"{n} {name}": part
            for n in subjects.tolist()
            for name, part in row_of(stack, n).items()
        }

    expected = lived(None)
    assert all(part.isfinite().all() for part in expected.values())
    for disturb in DISTURBANCES:
        assert_identical(lived(disturb), expected)


def waiting(env: GrowthEnv) -> Tensor:
    """WAIT actions."""
    return torch.zeros(env.count, len(HEADS), dtype=torch.long, device=env.device)


@DEVICES
@DTYPES
def test_only_the_diverged_environment_is_rolled_back(device: str, dtype: torch.dtype) -> None:
    env = environment(Precision(device, dtype))
    assert env.precision.enabled
    env.reset(0)
    (shard,) = env.shards
    shard.engine.stack.host[SUBJECT] = NAN
    report = env.step(waiting(env)).report
    assert report.rollback.tolist() == [0, Reason.NOT_FINITE, 0, 0]
    assert report.train_loss.isnan().tolist() == [False, True, False, False]
    assert report.scores.loss.isfinite().all()


@DEVICES
def test_an_overflow_skips_only_its_own_update_and_causes_no_rollback(device: str) -> None:
    env = environment(Precision(device, torch.float16))
    env.load_state(env.state() | {"scale": torch.tensor([1024.0, 2.0**40, *[1024.0] * 4])})
    env.reset(0)
    report = env.step(waiting(env)).report
    assert env.scales is not None
    assert env.scales.skipped.tolist() == [0, 1, 0, 0, 0, 0]
    assert report.rollback.tolist() == [0, 0, 0, 0]
    assert report.train_loss.isfinite().all()
    (shard,) = env.shards
    assert shard.engine.stack.host_optimizer.step.tolist() == [1, 0, 1, 1, 1, 1]
