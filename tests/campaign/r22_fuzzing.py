"""R22: parsers of bytes from a medium or the network refuse bad bytes with their own error, within bounds.

Method: coverage-guided fuzzing by Atheris (random mutations without it) of record, encoded record, table,
directory of an engine, S3 pack and notes, RESP, HTTP, peer frames and configuration.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from kvstore.testing.seeds import fresh_seed
from tests.campaign.program import ROOT, failed, passed, seconds

NAMES = (
    "record", "coded", "table", "directory", "pack", "resp", "http", "peer", "config",
)  # fmt: skip
FUZZERS = Path("/tmp/fuzz")
"""Where ``pip install --target /tmp/fuzz atheris`` puts Atheris."""

if __name__ == "__main__":
    seed, total = fresh_seed(), 0
    each = max(3, int(seconds() / len(NAMES)))
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{FUZZERS}"}
    guided = FUZZERS.is_dir()
    for name in NAMES:
        with tempfile.TemporaryDirectory(prefix="kvstore-fuzz-") as directory:
            command = [sys.executable, "-m", "tests.campaign.fuzz", name, "--seconds", str(each), "--seed", str(seed)]
            # An input that never ends is a finding, too; a busy machine takes its time.
            command = ["timeout", "--kill-after=5", str(4 * each + 120), *command, "--artifacts", directory]
            done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            output = done.stdout.decode(errors="replace")
            print(name, output[-6000:], flush=True)
            if done.returncode:
                found = [path.read_bytes().hex()[:400] for path in Path(directory).iterdir()]
                failed(f"{name}, seed {seed}: status {done.returncode}, input {found}")
        runs = re.findall(r"number_of_executed_units: (\d+)", output) or re.findall(r"([\d,]+) executions", output)
        if not runs or not int(runs[-1].replace(",", "")):
            failed(f"{name}, seed {seed}: nothing was executed")
        total += int(runs[-1].replace(",", ""))
    how = "coverage-guided" if guided else "random mutations"
    passed(f"{total:,} executions of {len(NAMES)} targets, {how}, no finding (goal: 10,000,000)")
