"""Run tests; run those that failed once more, alone, one after the other, in one process.

    python -m tests.second_chance [arguments of pytest]

A test that passes the second time is printed as ``flaky: NAME (first failure: …)`` and does not fail the run, unless
there are more than ``FLAKY_MAX`` different failures. A test that fails twice fails the run, and so does any error but a
failed test. A failed teardown may be the fault of an earlier test, so all tests of its file run again.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest

FLAKY_MAX: Final = 5
FAILED_MAX: Final = 20
"""With more failures the change is broken, and a second run only takes time."""

LIMIT_S: Final = 4500
"""Time limit of a run: xdist can wait forever after the death of a worker. CI has 90 minutes."""

_OUTCOMES: Final = "kvstore/outcomes"
_TEARDOWN: Final = "teardown: "
_UNRAISABLE: Final = "PytestUnraisableExceptionWarning"
"""A leftover of one test that is found during another one."""

_outcomes: dict[str, str] = {}
"""The reason of its first failure for each test, and for each other error; an empty one for a test that passed."""


def main(arguments: Sequence[str]) -> int:
    """Return the exit status of the run: 0, or a status of pytest."""
    with tempfile.TemporaryDirectory(prefix="kvstore-tests-") as directory:
        cache = Path(directory, "v")
        command = [sys.executable, "-m", "pytest", "-p", "tests.second_chance", "-o", f"cache_dir={directory}"]
        status = _run([*command, *arguments])
        first = _read(cache)
        failed = {name: reason for name, reason in first.items() if reason}
        if status != pytest.ExitCode.TESTS_FAILED or not 0 < len(failed) <= FAILED_MAX:
            # xdist can end with status 0 after an internal error.
            return status or (pytest.ExitCode.TESTS_FAILED if failed or not first else pytest.ExitCode.OK)
        files = {name.partition("::")[0] for name, reason in failed.items() if _is_of_file(reason)}
        again = [name for name in first if name in failed or name.partition("::")[0] in files]
        print(f"--- second chance for {len(failed)} of {len(first):,} tests", flush=True)
        (cache / "cache" / "lastfailed").write_text(json.dumps(dict.fromkeys(again, True)))
        status = _run([*command, *arguments, "-n", "0", "--last-failed", "--last-failed-no-failures", "none"])
        second = _read(cache)
    flaky = [name for name in failed if second.get(name) == ""]
    for name in flaky:
        print(f"flaky: {name} (first failure: {failed[name]})")
    for name in failed:
        if name not in flaky:
            print(f"failed, and did not pass alone: {name}")
    if len(flaky) < len(failed):
        return pytest.ExitCode.TESTS_FAILED
    if (causes := len({(name.partition("::")[0], failed[name]) for name in flaky})) > FLAKY_MAX:
        print(f"{causes} flaky failures; at most {FLAKY_MAX} are accepted")
        return pytest.ExitCode.TESTS_FAILED
    return status


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note an outcome; a test that failed in any phase, or in any process, has failed."""
    # xdist appends the group of a test to its name.
    name = report.nodeid.removesuffix("@" + report.nodeid.partition("::")[0])
    if report.failed:
        _note(name, report, _TEARDOWN if report.when == "teardown" else "")
    elif report.when == "call" and report.passed:
        _outcomes.setdefault(name, "")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Note a file that could not be collected."""
    if report.failed:
        _note(report.nodeid, report)


def pytest_internalerror(excrepr: object) -> None:
    """Note an error of pytest, of a plug-in or of a hook."""
    _outcomes["internal error"] = _in_ascii(str(excrepr).strip().rpartition("\n")[2])


def pytest_keyboard_interrupt(excinfo: pytest.ExceptionInfo[BaseException]) -> None:
    """Note an interruption, or a call of ``pytest.exit``."""
    _outcomes["interruption"] = _in_ascii(repr(excinfo.value))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Leave the outcomes for ``main``; workers have reported theirs to the process that started them."""
    if session.shouldfail:
        _outcomes["early end"] = str(session.shouldfail)
    if not hasattr(session.config, "workerinput") and session.config.cache is not None:
        session.config.cache.set(_OUTCOMES, _outcomes)


def _run(command: Sequence[str]) -> int:
    """Run pytest; a termination of this process interrupts it, so that it stops its servers and workers."""
    with subprocess.Popen(command) as process:

        def interrupt(number: int, frame: object) -> None:
            process.send_signal(signal.SIGINT)

        # A terminal sends SIGINT to pytest, too. Children would inherit SIG_IGN.
        signal.signal(signal.SIGINT, lambda number, frame: None)
        signal.signal(signal.SIGTERM, interrupt)
        try:
            return process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            print(f"not ended within {LIMIT_S} s", flush=True)
            process.terminate()
            return pytest.ExitCode.INTERNAL_ERROR


def _note(name: str, report: Any, prefix: str = "") -> None:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = (crash.message if crash else report.longreprtext).strip().partition("\n")[0]
    _outcomes[name] = _outcomes.get(name) or _in_ascii(prefix + (text or "no reason given"))


def _in_ascii(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode()


def _is_of_file(reason: str) -> bool:
    return reason.startswith(_TEARDOWN) or _UNRAISABLE in reason


def _read(cache: Path) -> dict[str, str]:
    path = cache / _OUTCOMES
    outcomes: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    path.unlink(missing_ok=True)
    return outcomes


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
