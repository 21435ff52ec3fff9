"""What the tests of the file backend share with pytest."""

from __future__ import annotations

import pytest

from tests.file.rig import Rig


@pytest.fixture(params=["io_uring", "threads"])
def either_engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test with each engine; without this fixture it is io_uring."""
    monkeypatch.setattr(Rig, "engine", request.param)


@pytest.fixture(autouse=True)
def nothing_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave upkeep to the tests, and to :meth:`Rig.settled`: once a second it makes system calls of its own.

    Tests that count calls, or let the n-th one fail, would on a slow machine meet them now and then.
    """
    monkeypatch.setattr("kvstore.backends.file.upkeep._TICK_S", 86400.0)
