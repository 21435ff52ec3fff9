"""What the programs of the campaign share: time and seed, the three verdicts, and running existing tests."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NoReturn

from kvstore.testing.seeds import SEED_VARIABLE, fresh_seed
from tests.sizes import SIZE_VARIABLE

NOT_RUN: Final = 77
"""Exit status of a program that can't run here; as in Automake."""

SECONDS_VARIABLE: Final = "KVSTORE_CAMPAIGN_SECONDS"
"""A program goes on for this long; its first round is always whole."""

ROOT: Final = Path(__file__).parents[2]
_COUNT: Final = re.compile(r"(\d+) (passed|failed|errors?|skipped|xfailed|deselected)")


def seconds() -> float:
    """Return the time that this program may take."""
    return float(os.environ.get(SECONDS_VARIABLE, 0))


def rounds() -> Iterator[int]:
    """Yield a seed for each round: one round at least, more while there is time."""
    rng = random.Random(first := fresh_seed())
    deadline = time.monotonic() + seconds()
    seed = first
    while True:
        print(f"round with {SEED_VARIABLE}={seed}", flush=True)
        yield seed
        if time.monotonic() >= deadline:
            return
        seed = rng.randrange(1, 1 << 32)


def passed(figure: str) -> NoReturn:
    """End with a figure."""
    _end(figure, 0)


def failed(reason: str) -> NoReturn:
    """End with what was found."""
    _end(reason, 1)


def not_run(reason: str) -> NoReturn:
    """End with the reason why the goal could not be tried."""
    _end(reason, NOT_RUN)


def run_tests(*arguments: str) -> NoReturn:
    """Run tests of the suite in full size, again with another seed while there is time, and end with how many passed.

    Args:
        arguments: Of pytest.
    """
    passed(figure_of_tests(rounds(), *arguments))


def figure_of_tests(seeds: Iterable[int], *arguments: str) -> str:
    """Run tests of the suite in full size with each seed; return how many passed."""
    total, turns, skips = 0, 0, 0
    for seed in seeds:
        env = os.environ | {SIZE_VARIABLE: "full", SEED_VARIABLE: str(seed)}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        output, status = _printed(command, env)
        counts = {what: int(count) for count, what in _COUNT.findall(output.strip().splitlines()[-1])}
        if status:
            failed(f"{counts}, seed {seed}; first failure: {_first_failure(output)}")
        total, turns, skips = total + counts.get("passed", 0), turns + 1, skips + counts.get("skipped", 0)
    if not total:
        not_run(f"all {skips} tests skipped themselves")
    skipped = f", {skips} skipped" if skips else ""
    return f"{total} tests passed in {turns} round{'s' * (turns > 1)}{skipped}"


def _printed(command: Sequence[str], env: Mapping[str, str]) -> tuple[str, int]:
    """Run a command; print its output as it comes, for the log of an unfinished run. Return it and the exit status."""
    lines = []
    with subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line)
    return "".join(lines), process.returncode


def _first_failure(output: str) -> str:
    return next((line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))), "see the log")[:300]


def _end(line: str, status: int) -> NoReturn:
    print(line, flush=True)
    sys.exit(status)
