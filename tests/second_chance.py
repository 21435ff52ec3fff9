"""Run tests; run those that failed once more, alone, one after the other, in one process.

    python -m tests.second_chance [arguments of pytest]

A test that passes the second time is printed as ``flaky: NAME (first failure: …)`` and does not fail the run, unless
there are more than ``FLAKY_MAX`` of them. A test that fails twice fails the run, and so does any error but a failed
test.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

FLAKY_MAX: Final = 5
FAILED_MAX: Final = 20
"""With more failures the change is broken, and a second run only takes time."""

_OUTCOMES: Final = "kvstore/outcomes"
_outcomes: dict[str, str] = {}
"""The reason of its first failure for each test; an empty one for a test that passed."""


def main(arguments: Sequence[str]) -> int:
    """Return the exit status of the run: 0, or a status of pytest."""
    with tempfile.TemporaryDirectory(prefix="kvstore-tests-") as directory:
        cache = Path(directory, "v")
        command = [sys.executable, "-m", "pytest", "-p", "tests.second_chance", "-o", f"cache_dir={directory}"]
        status = subprocess.run([*command, *arguments], check=False).returncode
        first = _read(cache)
        failed = [name for name, reason in first.items() if reason]
        if status != pytest.ExitCode.TESTS_FAILED or not 0 < len(failed) <= FAILED_MAX:
            return status
        print(f"--- second chance for {len(failed)} of {len(first):,} tests", flush=True)
        (cache / "cache" / "lastfailed").write_text(json.dumps(dict.fromkeys(failed, True)))
        again = ["-n", "0", "--last-failed", "--last-failed-no-failures", "none"]
        subprocess.run([*command, *arguments, *again], check=False)
        second = _read(cache)
    flaky = [name for name in failed if second.get(name) == ""]
    for name in flaky:
        print(f"flaky: {name} (first failure: {first[name]})")
    for name in failed:
        if name not in flaky:
            print(f"failed twice: {name}")
    if len(flaky) > FLAKY_MAX:
        print(f"{len(flaky)} tests are flaky; at most {FLAKY_MAX} may be")
    return pytest.ExitCode.OK if len(failed) == len(flaky) <= FLAKY_MAX else pytest.ExitCode.TESTS_FAILED


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note an outcome; a test that failed in any phase, or in any process, has failed."""
    # xdist appends the group of a test to its name.
    name = report.nodeid.removesuffix("@" + report.nodeid.partition("::")[0])
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        text = (crash.message if crash else report.longreprtext).strip()
        _outcomes[name] = _outcomes.get(name) or text.partition("\n")[0] or "no reason given"
    elif report.when == "call":
        _outcomes.setdefault(name, "")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Leave the outcomes for ``main``; workers have reported theirs to the process that started them."""
    if not hasattr(session.config, "workerinput") and session.config.cache is not None:
        session.config.cache.set(_OUTCOMES, _outcomes)


def _read(cache: Path) -> dict[str, str]:
    path = cache / _OUTCOMES
    outcomes: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    path.unlink(missing_ok=True)
    return outcomes


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
