"""Which tests reach which lines of kvstore: a plugin of pytest, and the start of processes that tests start.

A process that has ``KVSTORE_REACHED`` in its environment appends the lines that it runs to that file, each once, even
if it is killed. ``sitecustomize.py`` in the copy of the project starts this in the children of a test. Only the first
calls of a function are traced, because tracing slows it down many times.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import pytest

VARIABLE: Final = "KVSTORE_REACHED"

CALLS_MAX: Final = 300
"""Calls of a function that are traced in a test."""

TEST_S: Final = 30
"""A test that takes longer is left out."""

SITECUSTOMIZE: Final = f"""
import os, sys, threading
if path := os.environ.get("{VARIABLE}"):
    root = os.path.join(os.path.dirname(os.path.abspath(__file__)), "kvstore") + os.sep
    out, seen = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), set()
    calls = {{}}
    def line(frame, event, arg):
        place = (frame.f_code.co_filename, frame.f_lineno)
        if place not in seen:
            seen.add(place)
            try:
                os.write(out, f"{{place[0][len(root):]}}:{{place[1]}}\\n".encode())
            except OSError:
                pass
        return line
    def call(frame, event, arg):
        code = frame.f_code
        calls[code] = number = calls.get(code, 0) + 1
        return line(frame, event, arg) if number <= {CALLS_MAX} and code.co_filename.startswith(root) else None
    threading.settrace(call)
    sys.settrace(call)
"""


class Reached:
    """Plugin that notes the time of each passed test and the lines that it reached, also in its child processes.

    Args:
        root: Directory of the package, ending with a separator.
        children: File to which children append.
        answer: File for the result.
    """

    def __init__(self, root: str, children: Path, answer: Path) -> None:
        self._tests: dict[str, tuple[float, list[str]]] = {}
        self._answer = answer
        self._root = root
        self._children = children
        self._lines: set[tuple[str, int]] = set()
        self._calls: dict[CodeType, int] = {}
        self._failed = False
        self._forked = 0  # Descriptor of ``children`` in a fork.

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self._lines.clear()
        self._calls.clear()
        self._children.write_text("")
        self._failed = False
        began = time.monotonic()
        threading.settrace(self._call)
        sys.settrace(self._call)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            took_s = time.monotonic() - began
            lines = {f"{path.removeprefix(self._root)}:{line}" for path, line in list(self._lines)}
            lines.update(self._children.read_text().splitlines())
            self._tests[item.nodeid] = (-1.0 if self._failed else took_s, sorted(lines))
            if len(self._tests) % 20 == 0:  # The rest is lost if a test hangs.
                self._answer.write_text(json.dumps(self._tests))

    def pytest_configure(self, config: pytest.Config) -> None:
        _know_marks(config)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            item.add_marker(pytest.mark.timeout(TEST_S), append=False)

    def pytest_sessionstart(self) -> None:
        os.environ[VARIABLE] = str(self._children)
        os.register_at_fork(after_in_child=self._after_fork)

    def pytest_sessionfinish(self) -> None:
        self._answer.write_text(json.dumps(self._tests))

    def _after_fork(self) -> None:
        self._forked = os.open(self._children, os.O_WRONLY | os.O_APPEND)
        self._lines.clear()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed |= not report.passed

    def _call(self, frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        self._calls[code] = number = self._calls.get(code, 0) + 1
        return (
            self._line(frame, event, arg) if number <= CALLS_MAX and code.co_filename.startswith(self._root) else None
        )

    def _line(self, frame: FrameType, event: str, arg: object) -> Any:
        place = (frame.f_code.co_filename, frame.f_lineno)
        if self._forked and place not in self._lines:
            with contextlib.suppress(OSError):
                os.write(self._forked, f"{place[0].removeprefix(self._root)}:{place[1]}\n".encode())
        self._lines.add(place)
        return self._line


class Chosen:
    """Plugin that runs only the tests given, in their order."""

    def __init__(self, tests: Sequence[str]) -> None:
        self._order = {test: number for number, test in enumerate(tests)}

    def pytest_configure(self, config: pytest.Config) -> None:
        _know_marks(config)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        left_out = [item for item in items if item.nodeid not in self._order]
        config.hook.pytest_deselected(items=left_out)
        items[:] = sorted(
            (item for item in items if item.nodeid in self._order), key=lambda item: self._order[item.nodeid]
        )


def _know_marks(config: pytest.Config) -> None:
    """Make the mark known that conftest.py sets, without its plugin."""
    config.addinivalue_line("markers", "xdist_group: of pytest-xdist")
