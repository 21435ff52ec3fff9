"""For every test run of the project: skips fail in CI, and heavy tests come first, each file in one worker."""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

HEAVY_MARKERS = ("engine", "torture")
VLLM_TESTS = Path(__file__).parent / "tests" / "vllm"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--no-skips``, which CI uses."""
    parser.addoption(
        "--no-skips",
        action="store_true",
        help="count every skipped test as failed: for machines on which all tests can run",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark heavy tests, put them first, and keep those of a file in one worker (``--dist loadgroup``).

    Tests that import vLLM count as heavy: the import is slow, and the tests of a file share engines, which use much
    memory. They come first so that no long file begins when the other worker has nothing left. This hook runs first
    because the selection by marks reads these marks.
    """
    for item in items:
        imports_vllm = item.path.is_relative_to(VLLM_TESTS)
        if imports_vllm or any(item.get_closest_marker(name) for name in HEAVY_MARKERS):
            item.add_marker(pytest.mark.heavy)
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
    items.sort(key=lambda item: item.get_closest_marker("heavy") is None)


@pytest.fixture(scope="module", autouse=True)
def leftovers_fail_their_own_module() -> Iterator[None]:
    """Collect the garbage of a module at its end, so that what it left open fails no other.

    Existing objects are exempt: with the suite, torch and vLLM in memory a collection takes half a second.
    """
    gc.freeze()
    yield
    gc.collect()


def pytest_unconfigure() -> None:
    """Let the interpreter free all objects at its end: some libraries report those that it could not."""
    gc.unfreeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a test that skipped itself, if skips are not allowed."""
    return _without_skip(item.config, (yield))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Fail a module that skipped itself, if skips are not allowed."""
    return _without_skip(collector.config, (yield))


def _without_skip(config: pytest.Config, report: Any) -> Any:
    if report.skipped and config.getoption("--no-skips") and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid}: skipped, and --no-skips allows none: {reason}"
    return report
