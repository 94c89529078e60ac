"""Tests that ask for the fixture ``backend`` run once with each of them."""

import pytest

import support
from esper.tolaria.backends.native.build import Unavailable, library


@pytest.fixture(params=["torch", "native"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the backend that ``support`` makes."""
    if request.param == "native":
        try:
            library()
        except Unavailable as reason:
            pytest.skip(f"no native backend: {reason}")
    monkeypatch.setattr(support, "backend_name", request.param)
    return request.param
