"""Random walks of real engines of each vLLM version, compared with engines without offloading (tests/vllm/walk)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvstore.testing.seeds import fresh_seed
from tests.vllm.engines import ROOT
from tests.vllm.versions import INSTALLED, VERSIONS, environment, is_there

pytestmark = [pytest.mark.engine]

REQUESTS_VARIABLE = "KVSTORE_WALK_REQUESTS"
TIMEOUT_S = 3000
_MET = (
    *("preemptions", "aborts", "resets", "running resets", "drained resets", "sleeps", "weights", "turns"),
    # How much a leg loads from its tiers depends on the machine's speed: under kvstore's manager, and under vLLM's.
    *("blocks from tiers", "bytes from tiers"),
)
_MET_BY_EACH_LEG = {
    "kvstore": ("cached tokens", "evicted blocks", "stored blocks"),
    "vllm": ("cached tokens", "stored blocks"),
}


@pytest.mark.walk
@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize("version", VERSIONS)
def test_every_answer_is_right_and_nothing_is_left(version: str, tmp_path: Path) -> None:
    """Under both managers no token or block is wrong, no engine dies, and no state is held at the end."""
    if not is_there(version):
        pytest.skip(f"vLLM {version} is not here: scripts/vllm_versions.sh makes it, and needs a package index")
    seed, requests = fresh_seed(), int(os.environ.get(REQUESTS_VARIABLE, 2000))
    command = ["-m", "tests.vllm.walk", "--seed", str(seed), "--requests", str(requests)]
    where = f"vLLM {version}, seed {seed}, {requests} requests"
    print(where)
    log = tmp_path / "log"
    with log.open("wb") as errors:
        walk = subprocess.run(
            [sys.executable, *command, "--directory", str(tmp_path)],
            cwd=ROOT,
            env=environment(version, tmp_path),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            timeout=TIMEOUT_S,
            check=False,
        )
    reports = [json.loads(line) for line in walk.stdout.splitlines() if line.startswith(b"{")]
    tail = log.read_text(errors="replace")[-5000:]
    assert reports and reports[-1].get("done"), f"{where}: it ended with {walk.returncode}: {tail}"
    assert reports[-1]["vllm"].split("+")[0] == version
    legs = [report for report in reports if "leg" in report]
    bad = [leg for leg in legs if leg["wrong"] or leg["wrong blocks"] or leg["error"] or leg["left"]]
    assert not bad, f"{where}: {[_shortly(leg) for leg in bad]}\n{tail}"
    assert sum(leg["requests"] for leg in legs) == requests
    # A walk without these events proves nothing.
    for name in _MET:
        assert sum(leg["counts"].get(name, 0) for leg in legs), f"{where}: no {name}"
    for leg in legs:
        missing = [name for name in _MET_BY_EACH_LEG[leg["plan"]["manager"]] if not leg["counts"].get(name)]
        assert not missing, f"{where}: no {missing} in {_shortly(leg)}"
    counts = sum((Counter(leg["counts"]) for leg in legs), Counter())
    judged, unjudged = counts["stored blocks"], counts["blocks not judged"]
    assert unjudged < judged / 10, f"{where}: {judged} stored blocks compared, and {unjudged} not"
    print(f"{where}: {judged} stored blocks compared, {reports[-1]['cpu_s']} CPU seconds")
    assert walk.returncode == 0, f"{where}: it ended with {walk.returncode}: {tail}"


_REVERSED = """
import sys
from tests.vllm.walk import __main__ as walk
from tests.vllm.walk.slow_copies import SlowCopies

submit_store = SlowCopies.submit_store

def submit_reversed(self, job, source, target):
    source.block_ids = source.block_ids[::-1]
    return submit_store(self, job, source, target)

SlowCopies.submit_store = submit_reversed
sys.exit(walk.main())
"""
"""A walk that stores other blocks of a request in place of the right ones, under the right keys and valid checksums."""


@pytest.mark.timeout(600)
def test_block_with_the_bytes_of_another_is_found(tmp_path: Path) -> None:
    """The second oracle describes each block with the numbers of another, and which one it is."""
    arguments = ["--seed", "1", "--requests", "120", "--only", "dense-kvstore", "--directory", str(tmp_path)]
    run = subprocess.run(
        [sys.executable, "-c", _REVERSED, *arguments],
        cwd=ROOT,
        env=environment(INSTALLED, tmp_path),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        check=False,
    )
    assert run.returncode == 1
    legs = [json.loads(line) for line in run.stdout.splitlines() if line.startswith(b'{"vllm"') and b'"leg"' in line]
    assert len(legs) == 2
    assert all(leg["wrong blocks"] for leg in legs)
    assert any("it is block" in text for leg in legs for text in leg["wrong blocks"])


def _shortly(leg: dict[str, Any]) -> str:
    names = ("leg", "plan", "counts", "error", "left")
    wrong = {kind: [len(leg[kind]), *leg[kind][:5]] for kind in ("wrong", "wrong blocks")}
    return json.dumps({**{name: leg[name] for name in names}, **wrong}, indent=1)
