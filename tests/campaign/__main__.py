"""Reliability campaign: run the program of each goal and print one line per goal.

    python -m tests.campaign [--minutes M] [--seed S] [--record] [R1 R7 ...]

Programs are ``rNN_*.py`` in this directory, and ``suite.py`` for goals that tests of the suite try. A program exits
with 0 (PASS), 1 (FAIL) or 77 (NOT RUN), and its last line of output is the figure or the reason.
"""

from __future__ import annotations

import argparse
import datetime
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from examples.serving import kill_session
from kvstore.testing.seeds import SEED_VARIABLE
from tests.campaign.program import NOT_RUN, SECONDS_VARIABLE
from tests.campaign.suite import GOALS

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "reliability.md"
VERDICTS = {0: "PASS", NOT_RUN: "NOT RUN"}
LIMIT_S = 1800
"""Time that a program may take beyond its share."""


def main() -> int:
    """Command line; the exit status is 1 if any goal failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("goals", nargs="*", help="such as R7; all unless given")
    parser.add_argument("--minutes", type=float, default=0, help="repeat goals with new seeds for so long in total")
    parser.add_argument("--seed", type=int, default=0, help="of all programs; random unless given")
    parser.add_argument("--record", action="store_true", help=f"write figures and dates to {PAGE.relative_to(ROOT)}")
    args = parser.parse_args()
    # A shell starts background jobs with SIGINT ignored, and tests of signals inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    seed = args.seed or random.SystemRandom().randrange(1, 1 << 32)
    known = programs()
    if unknown := set(args.goals) - set(known):
        parser.error(f"unknown goals: {', '.join(sorted(unknown))}. Known: {', '.join(known)}.")
    chosen = {goal: program for goal, program in known.items() if not args.goals or goal in args.goals}
    logs = Path(tempfile.mkdtemp(prefix="kvstore-campaign-"))
    print(f"seed {seed}, {args.minutes:g} minutes, logs in {logs}", flush=True)
    failed, deadline = 0, time.monotonic() + 60 * args.minutes
    # The last goals have the longest rounds; the others share the rest of the time.
    for left, (goal, program) in reversed(list(enumerate(chosen.items(), 1))):
        share = max(0.0, deadline - time.monotonic()) / left
        verdict, figure = run(goal, program, seed, share, logs / f"{goal}.log")
        failed += verdict == "FAIL"
        print(f"{goal:4} {verdict:8} {figure}", flush=True)
        if args.record:
            record(goal, verdict, figure)
    return 1 if failed else 0


def programs() -> dict[str, list[str]]:
    """Return the arguments of Python for each goal, in order."""
    own = {f"R{int(path.stem[1:3])}": ["-m", f"tests.campaign.{path.stem}"] for path in HERE.glob("r[0-9][0-9]_*.py")}
    found = own | {goal: ["-m", "tests.campaign.suite", goal] for goal in GOALS}
    return dict(sorted(found.items(), key=lambda item: int(item[0][1:])))


def run(
    goal: str, program: Sequence[str], seed: int, seconds: float, log: Path, *, limit_s: float = LIMIT_S
) -> tuple[str, str]:
    """Run one program; return its verdict and its figure with seed and duration.

    A program that takes longer than ``seconds`` and ``limit_s`` has failed.
    """
    env = os.environ | {SEED_VARIABLE: str(seed), SECONDS_VARIABLE: str(seconds), "PYTHONPATH": str(ROOT)}
    started = time.monotonic()
    with log.open("a") as output:
        process = subprocess.Popen(
            [sys.executable, *program], cwd=ROOT, env=env, stdout=output, stderr=output, start_new_session=True
        )
        try:
            status = process.wait(seconds + limit_s)
        except subprocess.TimeoutExpired:
            status = 1
            output.write(f"\nnot finished after {time.monotonic() - started:.0f} s\n")
        finally:
            # Its tests and their servers end with it, also when this is interrupted.
            kill_session(process)
    lines = log.read_text(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
    verdict = VERDICTS.get(status, "FAIL")
    repeat = f"; repeat with --seed {seed} {goal}, log {log}" if verdict == "FAIL" else ""
    return verdict, f"{last} ({time.monotonic() - started:.0f} s{repeat})"


def record(goal: str, verdict: str, figure: str) -> None:
    """Write the verdict, the figure and the date into the row of a goal."""
    figure = re.sub(r" \(\d+ s.*\)$", "", figure).replace("|", "/")
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    row = re.compile(rf"^(\| {goal} \|[^|]*\|[^|]*\|)[^|]*\|[^|]*(\|.*)$", re.MULTILINE)
    text, count = row.subn(lambda m: f"{m[1]} {verdict}: {figure} | {today} {m[2]}", PAGE.read_text())
    if count != 1:
        raise SystemExit(f"{PAGE} has {count} rows of {goal}; expected 1")
    PAGE.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
