"""The seccomp profile of ``deploy/``, applied to a process by libseccomp, which container runtimes use too."""

from __future__ import annotations

import ctypes
import ctypes.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.project.tree import ROOT

pytestmark = pytest.mark.repository

PROFILE = ROOT / "deploy/kubernetes/seccomp-io-uring.json"
needs_seccomp = pytest.mark.skipif(ctypes.util.find_library("seccomp") is None, reason="needs libseccomp")
OPERATORS = {"SCMP_CMP_LT": 2, "SCMP_CMP_EQ": 4, "SCMP_CMP_GT": 6, "SCMP_CMP_MASKED_EQ": 7}


class Comparison(ctypes.Structure):
    """A condition on an argument: ``struct scmp_arg_cmp``."""

    _fields_ = (("arg", ctypes.c_uint), ("op", ctypes.c_int), ("first", ctypes.c_uint64), ("second", ctypes.c_uint64))


def apply_profile(profile: dict[str, Any]) -> None:
    """Apply a profile to this process and its threads, for good."""
    library = ctypes.CDLL("libseccomp.so.2")
    library.seccomp_init.restype = ctypes.c_void_p
    actions = {"SCMP_ACT_ALLOW": 0x7FFF0000, "SCMP_ACT_ERRNO": 0x00050000}
    context = ctypes.c_void_p(library.seccomp_init(actions[profile["defaultAction"]] | profile["defaultErrnoRet"]))
    for rule in profile["syscalls"]:
        given = [
            Comparison(each["index"], OPERATORS[each["op"]], each["value"], each.get("valueTwo", 0))
            for each in rule.get("args", [])
        ]
        conditions = (Comparison * len(given))(*given)
        for name in rule["names"]:
            number = library.seccomp_syscall_resolve_name(name.encode())
            if number == -1:
                continue  # Newer than this libseccomp; runtimes skip it, too.
            action = ctypes.c_uint32(actions[rule["action"]] | rule.get("errnoRet", 0))
            done = library.seccomp_rule_add_array(context, action, number, len(given), conditions)
            assert done == 0, (name, done)
    assert library.seccomp_load(context) == 0


def run_tier(directory: Path, without: str) -> None:
    """Under the profile less the system calls that begin with ``without``: store and load a block; print the gauge."""
    profile = json.loads(PROFILE.read_text())
    profile["syscalls"][0]["names"] = [
        name for name in profile["syscalls"][0]["names"] if not without or not name.startswith(without)
    ]
    apply_profile(profile)
    from kvstore import Namespace, TransferJob, open_tier

    memory = bytearray(b"\x07" * 4096 + bytes(4096))
    options = {"backend": "file", "path": str(directory), "capacity": "16MiB"}
    tier = open_tier(options, primary=memoryview(memory), slot_bytes=4096, namespace=Namespace({"model": "seccomp"}))
    tier.submit_store(TransferJob(1, keys=[b"key"], slots=[0]))
    assert tier.drain(20)
    tier.submit_load(TransferJob(2, keys=[b"key"], slots=[1]))
    assert tier.drain(20)
    assert all(job.success for job in tier.get_finished()) and memory[:4096] == memory[4096:]
    print(int(tier.stats().backend_gauges["io_uring"]))
    tier.close()


@needs_seccomp
@pytest.mark.parametrize(("without", "expected"), [("", "1"), ("io_uring", "0")])
def test_a_disk_tier_runs_under_the_profile(tmp_path: Path, without: str, expected: str) -> None:
    """A tier stores and loads by io_uring under the profile, and by threads under the profile without io_uring."""
    code = f"from tests.project.test_seccomp import *; run_tier(Path({str(tmp_path / 'kv')!r}), {without!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{expected}\n"), done.stderr
