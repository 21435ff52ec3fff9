"""R3: eight processes that store and load in one directory never read a wrong byte.

Method: blocks whose bytes follow from their key, four times as many as fit, so that slots are reused constantly;
every loaded block is compared.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.campaign.program import failed, passed, rounds, seconds
from tests.torture.plan import run_plan

if __name__ == "__main__":
    hits = stored = 0
    for seed in rounds():
        with tempfile.TemporaryDirectory() as directory:
            config = {"backend": "file", "path": str(Path(directory) / "kv"), "capacity": "8MiB", "reserve": 0}
            at_least = {"started": 8, "stored": 100, "hits": 100}
            length = max(10, min(120, int(seconds())))
            report = run_plan(
                config=config, writers=8, universe=2000, seconds=length, seed=seed, at_least=at_least
            )  # Jobs of six blocks.
        if report["wrong"] or report["errors"]:
            failed(f"seed {seed}: {report}")
        if any(report[name] < count for name, count in at_least.items()):
            failed(f"seed {seed}: too little was done: {report}")
        hits, stored = hits + report["hits"], stored + report["stored"]
    passed(f"0 wrong in {hits:,} load jobs with hits beside {stored:,} store jobs, 8 processes")
