"""Limits of the manager that tests shorten."""

from __future__ import annotations

import pytest


@pytest.fixture
def short_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reset waits for tiers for a tenth of a second."""
    monkeypatch.setattr("kvstore.vllm.manager._DRAIN_S", 0.1)


@pytest.fixture
def reports_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call of ``get_stats`` makes a report."""
    monkeypatch.setattr("kvstore.vllm.manager._REPORT_INTERVAL_S", 0.0)
