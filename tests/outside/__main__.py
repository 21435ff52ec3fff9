"""Other people's tests and programs against kvstore: ``python -m tests.outside``.

vLLM's tests come with the source distribution of the newest supported version. They are downloaded once, into the
virtual environment, and run over that version's Python (scripts/vllm_versions.sh) with kvstore's classes in place of
vLLM's (vllm_adapter.py). The report is a table; the exit status is 0 only if every test passed that applies.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
VERSION = "0.33.0"
FOLDER = Path(sys.prefix) / "outside" / f"vllm-{VERSION}"
_PARTS = (
    "tests/__init__.py",
    "tests/utils.py",
    "tests/v1/__init__.py",
    "tests/v1/kv_offload/",
    "tests/v1/kv_connector/",
)
_ATTEMPTS = 3


@dataclass(frozen=True)
class Outsider:
    """A group of vLLM's tests."""

    name: str
    checks: str  # What of kvstore they check.
    path: str


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


def fetch() -> None:
    """Download and unpack vLLM's tests, unless they are there, with the tiny model that they name."""
    if (FOLDER / "tests").is_dir():
        return
    FOLDER.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER.parent) as scratch:
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "vllm"]
        for attempt in range(_ATTEMPTS):
            time.sleep(5 * attempt)
            if subprocess.run([*download, "--dest", scratch, f"vllm=={VERSION}"], check=False).returncode == 0:
                break
        else:
            raise SystemExit(f"outside: the source of vLLM {VERSION} could not be downloaded")
        made = Path(scratch) / "made"
        (archive,) = Path(scratch).glob("*.tar.gz")
        with tarfile.open(archive) as source:
            for member in source:
                _, _, name = member.name.partition("/")
                if member.isfile() and name.startswith(_PARTS):
                    member.name = name
                    source.extract(member, made, filter="data")
        # vLLM's tests name this model, and need only its configuration.
        code = "import sys, pathlib, examples.tiny_llama as m; m.make_tiny_llama(pathlib.Path(sys.argv[1]))"
        subprocess.run([sys.executable, "-c", code, str(made / "facebook/opt-125m")], cwd=ROOT, check=True)
        made.rename(FOLDER)


def run() -> Counter[tuple[str, str]]:
    """Run all groups in one session of pytest; return the number of tests by group and result."""
    paths = [FOLDER, Path(sys.prefix) / "vllm-versions" / VERSION, ROOT, ROOT / "tests" / "outside"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    found: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        options = ["-q", "-n", "2", "-c", os.devnull, "--rootdir", str(FOLDER), "-p", "no:cacheprovider", "--tb=short"]
        options += ["--timeout", "120", "-p", "vllm_adapter", "--junitxml", str(report), "-W", "ignore"]
        # The configuration of all of vLLM's tests needs packages that these do not.
        options += ["--confcutdir", str(FOLDER / "tests/v1")]
        command = [sys.executable, "-m", "pytest", *options, *(outsider.path for outsider in OUTSIDERS)]
        ended = subprocess.run(command, cwd=FOLDER, env=environment, check=False)
        for test in ElementTree.parse(report).getroot().iter("testcase") if report.exists() else ():
            module = test.get("classname", "").replace(".", "/")
            name = next((each.name for each in OUTSIDERS if module.startswith(each.path.removesuffix(".py"))), module)
            results = {child.tag for child in test}
            bad, other = results & {"failure", "error"}, "skipped" in results  # With expected failures.
            found[name, "failed" if bad else "other" if other else "passed"] += 1
    if ended.returncode:
        found["pytest", "failed"] += 1
    return found


def main() -> int:
    """Run all outsiders and print the table."""
    fetch()
    found = run()
    print("| outsider | checks | passed | do not apply | failed |", "|---|---|---|---|---|", sep="\n")
    for each in OUTSIDERS:
        counts = [found[each.name, result] for result in ("passed", "other", "failed")]
        print(f"| {each.name} | {each.checks} |", *(f"{count} |" for count in counts))
    is_good = all(found[each.name, "passed"] for each in OUTSIDERS)
    return 0 if is_good and not any(count for (_, result), count in found.items() if result == "failed") else 1


if __name__ == "__main__":
    sys.exit(main())
