"""R34: every stored or loaded block has the numbers of an engine that only computed its tokens.

Method: walks of real engines (tests/vllm/walk) with requests of all kinds.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Final

from tests.campaign.program import ROOT, failed, passed, rounds
from tests.vllm.versions import INSTALLED, environment

REQUESTS: Final = 2000
"""Of each walk."""

if __name__ == "__main__":
    total: Counter[str] = Counter()
    largest = 0.0
    for seed in rounds():
        with tempfile.TemporaryDirectory(prefix="kvstore-r34-") as folder:
            command = ["-m", "tests.vllm.walk", "--seed", str(seed), "--requests", str(REQUESTS), "--directory", folder]
            run = subprocess.run(
                [sys.executable, *command],
                cwd=ROOT,
                env=environment(INSTALLED, Path(folder)),
                stdout=subprocess.PIPE,
                text=True,
                check=False,
            )
        print(run.stdout, flush=True)
        legs = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{") and '"leg"' in line]
        for leg in legs:
            total += Counter({"requests": leg["requests"], **leg["counts"]})
            if bad := leg["wrong blocks"] or leg["wrong"]:
                failed(f"{leg['leg']}, seed {seed}: {len(bad)} wrong; the first: {bad[0][:500]}")
            largest = max(largest, leg["largest difference of a block"])
        if run.returncode:
            failed(f"seed {seed}: the walk ended with {run.returncode}")
        if not total["stored blocks"] > 10 * total["blocks not judged"] or not total["loaded blocks"]:
            failed(f"seed {seed}: too few blocks were compared: {dict(total)}")
    counts = ", ".join(f"{total[name]:,} {name}" for name in ("requests", "stored blocks", "loaded blocks"))
    passed(
        f"{counts}, 0 outside the tolerance, largest difference {largest:.1g}; {total['blocks not judged']} not judged"
    )
