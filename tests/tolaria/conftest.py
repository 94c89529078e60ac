"""Runs tests that use the fixture ``backend`` once with each backend."""

import pytest

import support


@pytest.fixture(params=["torch", pytest.param("native", marks=support.needs_native)])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of the backend that ``support`` creates."""
    monkeypatch.setattr(support, "backend_name", request.param)
    return request.param
