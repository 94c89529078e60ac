"""Mixed precision is on only where it is asked for and gains something."""

import pytest
import torch

from esper.tolaria.precision import resolve_precision


def test_it_is_off_unless_asked_for() -> None:
    precision = resolve_precision(False, torch.device("cpu"))
    assert not precision.enabled
    assert precision.reason is None


def test_a_device_that_cannot_says_why_and_runs_in_full_precision() -> None:
    precision = resolve_precision(True, torch.device("cpu"))
    assert not precision.enabled
    assert precision.reason is not None
    with precision.autocast():
        assert not torch.is_autocast_enabled("cpu")


def test_an_environment_variable_forbids_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESPER_DISABLE_AMP", "1")
    precision = resolve_precision(True, torch.device("cuda:0"))
    assert not precision.enabled
    assert precision.reason == "ESPER_DISABLE_AMP is set"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device_with_bfloat16_uses_it() -> None:
    precision = resolve_precision(True, torch.device("cuda:0"))
    assert precision.amp_dtype == torch.bfloat16
    with precision.autocast():
        product = torch.ones(2, 2, device="cuda") @ torch.ones(2, 2, device="cuda")
    assert product.dtype == torch.bfloat16
