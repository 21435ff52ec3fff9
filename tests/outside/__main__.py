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
    paths: tuple[str, ...]


OUTSIDERS = (
    Outsider(
        f"vLLM {VERSION}: offloading connector",
        "`KVStoreConnector` under vLLM's scheduler: lookups, stores, windows, preemption, events, metrics",
        ("tests/v1/kv_connector/unit/offloading_connector",),
    ),
    Outsider(
        f"vLLM {VERSION}: tiering",
        "kvstore's manager around vLLM's example tier",
        ("tests/v1/kv_offload/tiering/test_tiering_offloading.py",),
    ),
    Outsider(
        f"vLLM {VERSION}: CPU manager",
        "kvstore's manager without further tiers",
        ("tests/v1/kv_offload/cpu/test_manager.py",),
    ),
    Outsider(
        f"vLLM {VERSION}: file system tier",
        "kvstore's disk tier",
        ("tests/v1/kv_offload/tiering/test_fs_tier.py",),
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


def run(outsider: Outsider) -> tuple[int, int, int]:
    """Run a group of tests; return how many passed, do not apply, and failed."""
    paths = [FOLDER, Path(sys.prefix) / "vllm-versions" / VERSION, ROOT, ROOT / "tests" / "outside"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        options = ["-q", "-n", "2", "-c", os.devnull, "--rootdir", str(FOLDER), "-p", "no:cacheprovider", "--tb=short"]
        options += ["--timeout", "120", "-p", "vllm_adapter", "--junitxml", str(report), "-W", "ignore"]
        # The configuration of vLLM's other tests needs packages that these do not.
        options += ["--confcutdir", str(FOLDER / Path(outsider.paths[0]).parent)]
        ended = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *outsider.paths], cwd=FOLDER, env=environment, check=False
        )
        suite = ElementTree.parse(report).getroot().find("testsuite") if report.exists() else None
        if suite is None or ended.returncode not in (0, 1):
            return 0, 0, 1
        total, failed = int(suite.get("tests", 0)), int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        skipped = int(suite.get("skipped", 0))  # With those that are expected to fail.
        return total - failed - skipped, skipped, failed


def main() -> int:
    """Run all outsiders and print the table."""
    fetch()
    rows, is_good = [], True
    for outsider in OUTSIDERS:
        passed, other, failed = run(outsider)
        is_good &= not failed and passed > 0
        rows.append(f"| {outsider.name} | {outsider.checks} | {passed} | {other} | {failed} |")
    print("| outsider | checks | passed | do not apply | failed |", "|---|---|---|---|---|", *rows, sep="\n")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
