"""Other people's tests and programs against kvstore: ``python -m tests.outside``.

vLLM's tests come with the source distribution of the newest supported version. They are downloaded once, into the
virtual environment, and run over that version's Python (scripts/vllm_versions.sh) with kvstore's classes in place of
vLLM's (vllm_adapter.py).

SGLang and LMCache publish no tests of storage backends. Their packages, without their dependencies, are downloaded once
to a folder each; check_sglang.py and check_lmcache.py drive their own classes and programs over kvstore. Dynamo's
simulator and load generators are programs of others, too, with checks of ours.

The report is a table; the exit status is 0 only if every test passed that applies.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.outside.sources import LMCACHE, ROOT, SGLANG, VERSION, VLLM, packages, vllm_tests


@dataclass(frozen=True)
class Outsider:
    """A group of tests."""

    name: str
    checks: str  # What of kvstore they check.
    path: str
    packages: tuple[str, ...] = ()  # What they import, beyond the virtual environment; the first names the folder.


OUTSIDERS = (
    Outsider(
        f"vLLM {VERSION}: offloading connector",
        "`KVStoreConnector` under vLLM's scheduler: lookups, stores, windows, preemption, events, metrics",
        "tests/v1/kv_connector/unit/offloading_connector",
    ),
    Outsider(
        f"vLLM {VERSION}: tiering",
        "kvstore's manager around vLLM's example tier",
        "tests/v1/kv_offload/tiering/test_tiering_offloading.py",
    ),
    Outsider(
        f"vLLM {VERSION}: CPU manager",
        "kvstore's manager without further tiers",
        "tests/v1/kv_offload/cpu/test_manager.py",
    ),
    Outsider(
        f"vLLM {VERSION}: file system tier",
        "kvstore's disk tier",
        "tests/v1/kv_offload/tiering/test_fs_tier.py",
    ),
)
USERS = (
    Outsider(
        "SGLang 0.5.23: HiCache",
        "`kvstore.sglang` under SGLang's controller, host pools and factory; answers as its file backend's",
        "tests/outside/check_sglang.py",
        SGLANG,
    ),
    Outsider(
        "LMCache 0.5.6: L2 storage",
        "`kvstore.lmcache` under LMCache's storage manager, factory and `lmcache bench l2`",
        "tests/outside/check_lmcache.py",
        LMCACHE,
    ),
    Outsider(
        "Dynamo 1.6.1: simulated engine",
        "`kvstore-bench replay`: hit rates of a trace at four capacities",
        "tests/outside/check_dynamo.py",
    ),
    Outsider(
        "storage tools of LMCache, SGLang and Mooncake Store 0.3.13",
        "`bench/peers.py`: each tool stores, loads and compares all bytes, in its own storage and in kvstore",
        "tests/outside/check_peers.py",
    ),
    Outsider(
        "load generators of vLLM, guidellm 0.8.1 and LMCache 0.5.6",
        "a `vllm serve` with kvstore: all requests answered, prompts found",
        "tests/outside/check_generators.py",
    ),
)


def run() -> Counter[tuple[str, str]]:
    """Run all groups; return the number of tests by group and result."""
    vllm = [VLLM, Path(sys.prefix) / "vllm-versions" / VERSION, ROOT, ROOT / "tests" / "outside"]
    # The configuration of all of vLLM's tests needs packages that these do not.
    options = ["-n", "2", "--timeout", "120", "-p", "vllm_adapter", "--confcutdir", str(VLLM / "tests/v1")]
    found = _session(OUTSIDERS, VLLM, vllm, options)
    for outsider in USERS:
        extra = [packages(outsider.packages)] if outsider.packages else []
        found += _session((outsider,), ROOT, [*extra, ROOT], ["--timeout", "180"])
    return found


def _session(
    outsiders: Sequence[Outsider], folder: Path, paths: Sequence[Path], options: Sequence[str]
) -> Counter[tuple[str, str]]:
    """Run some groups in one session of pytest."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    results: dict[tuple[str, str], str] = {}
    with tempfile.TemporaryDirectory() as scratch:
        cache = ["-o", f"cache_dir={scratch}/cache"]
        fixed = ["-q", "-c", os.devnull, "--rootdir", str(folder), *cache, "--tb=short", "-W", "ignore"]
        # Many of these tests wait for a fixed time, so those that fail run once more, alone.
        for extra in ([], ["-n", "0", "--last-failed", "--last-failed-no-failures", "none"]):
            report = Path(scratch) / f"report{len(extra)}.xml"
            command = [sys.executable, "-m", "pytest", *fixed, "--junitxml", str(report), *options, *extra]
            command += [outsider.path for outsider in outsiders]
            ended = subprocess.run(command, cwd=folder, env=environment, check=False)
            for test in ElementTree.parse(report).getroot().iter("testcase") if report.exists() else ():
                kinds = {child.tag for child in test}
                result = "failed" if kinds & {"failure", "error"} else "other" if "skipped" in kinds else "passed"
                results[test.get("classname", "").replace(".", "/"), test.get("name", "")] = result
            if ended.returncode != pytest.ExitCode.TESTS_FAILED:
                break
    found: Counter[tuple[str, str]] = Counter()
    for (module, _), result in results.items():
        name = next((each.name for each in outsiders if module.startswith(each.path.removesuffix(".py"))), module)
        found[name, result] += 1
    if ended.returncode:
        found["pytest", "failed"] += 1
    return found


def main() -> int:
    """Run all outsiders and print the table."""
    vllm_tests()
    found = run()
    print("| outsider | checks | passed | do not apply | failed |", "|---|---|---|---|---|", sep="\n")
    for each in (*OUTSIDERS, *USERS):
        counts = [found[each.name, result] for result in ("passed", "other", "failed")]
        print(f"| {each.name} | {each.checks} |", *(f"{count} |" for count in counts))
    is_good = all(found[each.name, "passed"] for each in (*OUTSIDERS, *USERS))
    return 0 if is_good and not any(count for (_, result), count in found.items() if result == "failed") else 1


if __name__ == "__main__":
    sys.exit(main())
