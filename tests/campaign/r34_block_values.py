"""R34: every stored or loaded block has the numbers of an engine that only computed its tokens.

Method: walks of real engines (tests/vllm/walk), and for kinds that a walk does not have, engines one after the other.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, Final

from tests.campaign.program import ROOT, failed, passed, rounds
from tests.vllm.versions import INSTALLED, environment

REQUESTS: Final = 2000
"""Of each walk."""


def reports(module: str, name: str, folder: str, *more: str) -> list[dict[str, Any]]:
    """Run a program of the walks, and return its reports with this name."""
    Path(folder).mkdir()
    run = subprocess.run(
        [sys.executable, "-m", module, "--directory", folder, *more],
        cwd=ROOT,
        env=environment(INSTALLED, Path(folder)),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    print(run.stdout, flush=True)
    found = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{") and f'"{name}"' in line]
    for report in found:
        if bad := report.get("wrong blocks") or report.get("wrong"):
            failed(f"{report[name]}: {len(bad)} wrong; the first: {bad[0][:500]}")
    if run.returncode:
        failed(f"{module} {more} ended with {run.returncode}")
    return found


if __name__ == "__main__":
    total: Counter[str] = Counter()
    largest = 0.0
    not_run: list[str] = []
    for seed in rounds():
        with tempfile.TemporaryDirectory(prefix="kvstore-r34-") as folder:
            options = ("--seed", str(seed), "--requests", str(REQUESTS))
            legs = reports("tests.vllm.walk", "leg", f"{folder}/walk", *options)
            kinds = reports("tests.vllm.walk.kinds", "kind", f"{folder}/kinds")
        not_run = [kind["kind"] for kind in kinds if "not run" in kind]
        for report in (*legs, *(kind for kind in kinds if kind["kind"] not in not_run)):
            total += Counter({"requests": report.get("requests", 0), **report["counts"]})
            largest = max(largest, report["largest difference of a block"])
        if not total["stored blocks"] > 10 * total["blocks not judged"] or not total["loaded blocks"]:
            failed(f"seed {seed}: too few blocks were compared: {dict(total)}")
    counts = ", ".join(f"{total[name]:,} {name}" for name in ("requests", "stored blocks", "loaded blocks"))
    blank = f"; not run here: {', '.join(not_run)}" if not_run else ""
    compared = f"{counts}, 0 outside the tolerance, largest difference {largest:.1g}"
    passed(f"{compared}; {total['blocks not judged']} not judged{blank}")
