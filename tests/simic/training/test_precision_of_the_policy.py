"""The policy's precision: the rule that chooses it, and where it is written."""

from pathlib import Path

import pytest
import torch

from esper.karn.report.gather import RunData
from esper.karn.report.tables import summary
from esper.karn.sanctum.app import _identity
from esper.karn.sanctum.log import EventLog
from esper.karn.sanctum.signs import DARK
from esper.karn.sanctum.snapshot import Moment
from esper.karn.store import read_events
from esper.leyline.config import unflatten
from esper.leyline.errors import UsageError
from esper.leyline.events import AnalyticsSnapshot, TrainingStarted
from esper.leyline.precision_text import precision_text
from esper.simic.training.setup import compile_mode, policy_dtype
from esper.simic.training.vectorized import train_ppo_vectorized
from small_runs import SMALL
from synthetic import CPU
from virtual_device import virtual_device

GPU = torch.device("cuda:0")


def dtype_on(device: torch.device, bfloat16: bool, **settings: object) -> torch.dtype | None:
    with virtual_device(bfloat16=bfloat16):
        return policy_dtype(unflatten({"amp_policy": True} | settings), device)


@pytest.mark.parametrize(
    ("bfloat16", "amp_dtype", "expected"),
    [
        (True, "auto", torch.bfloat16),
        (False, "auto", torch.float16),
        (True, "bfloat16", torch.bfloat16),
        (True, "float16", torch.float16),
        (False, "float16", torch.float16),
    ],
)
def test_the_policy_follows_the_rule_of_the_hosts(
    bfloat16: bool, amp_dtype: str, expected: torch.dtype
) -> None:
    assert dtype_on(GPU, bfloat16, amp_dtype=amp_dtype) == expected


def test_bfloat16_on_a_device_without_it_is_refused() -> None:
    with pytest.raises(UsageError, match="amp_policy: cuda:0 has no bfloat16; use --amp-dtype"):
        dtype_on(GPU, False, amp_dtype="bfloat16")


def test_a_cpu_has_bfloat16() -> None:
    assert dtype_on(CPU, True) == torch.bfloat16
    assert dtype_on(CPU, True, amp_policy=False) is None


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ((None, None), "float32"),
        (("bfloat16", None), "bfloat16"),
        ((None, "float16"), "float32, policy float16"),
        (("bfloat16", "bfloat16"), "bfloat16, policy bfloat16"),
        ((None, None, True), "mixed precision"),
    ],
)
def test_both_precisions_are_written(given: tuple, text: str) -> None:
    assert precision_text(*given) == text


def test_a_policy_in_half_precision_is_not_called_float32(tmp_path: Path) -> None:
    settings = SMALL | {"rounds": 1, "amp_policy": True, "telemetry_dir": str(tmp_path)}
    run = train_ppo_vectorized(unflatten(settings)).path
    (started,), (snapshot,) = (
        list(read_events(run, kind)) for kind in (TrainingStarted, AnalyticsSnapshot)
    )
    assert (started.amp_policy_dtype, snapshot.amp_policy_dtype) == ("bfloat16", "bfloat16")
    assert (snapshot.amp_policy, snapshot.amp_dtype) == (True, None)
    assert "float32, policy bfloat16" in summary(RunData(run))
    log = EventLog(run)
    while log.poll():
        pass
    header = _identity("run", Moment(log, log.index), DARK).plain
    assert "cpu float32, policy bfloat16 ·" in header


def test_a_compiled_policy_on_a_cpu_is_advised_against(capsys) -> None:
    for mode, advised in (("auto", False), ("off", False), ("default", True)):
        assert compile_mode(mode, CPU) == ("off" if mode == "auto" else mode)
        error = capsys.readouterr().err
        assert error.count("\n") == advised
        assert error.startswith("warning: compile: ") == advised
