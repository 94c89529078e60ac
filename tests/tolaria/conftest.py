"""Tests that ask for the fixture ``backend`` run once with each of them."""

import pytest

import support


@pytest.fixture(params=["torch", pytest.param("native", marks=support.needs_native)])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the backend that ``support`` makes."""
    monkeypatch.setattr(support, "backend_name", request.param)
    return request.param
