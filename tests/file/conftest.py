"""What the tests of the file backend share with pytest."""

from __future__ import annotations

import pytest

from tests.file.rig import Rig


@pytest.fixture(params=["io_uring", "threads"])
def either_engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test with each engine; without this fixture it is io_uring."""
    monkeypatch.setattr(Rig, "engine", request.param)
