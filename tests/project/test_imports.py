"""The cost of ``import kvstore``, and the modules that it loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project.tree import ROOT

pytestmark = pytest.mark.repository

FOR_BACKENDS = {
    *("backends", "backends.base", "backends.simple", "config", "errors", "files", "namespace", "quantity"),
    *("runtime", "runtime.limits", "secret", "types"),
}
"""Modules of kvstore that ``import kvstore`` may load: the interface of backends."""

LIST_OURS = """
import json, sys
import kvstore
print(json.dumps([name for name in sys.modules if name.startswith("kvstore.")]))
"""

LIST_THEM = """
import json, sys
import msgspec, numpy, xxhash  # With what they load themselves.
before = set(sys.modules)
import kvstore
print(json.dumps(sorted({name.partition(".")[0] for name in set(sys.modules) - before})))
"""


def _run(code: str) -> str:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout


def test_import_loads_little_of_kvstore() -> None:
    """Importing kvstore loads only the interface of backends; the implementation is loaded at its first use."""
    loaded = {name.removeprefix("kvstore.") for name in json.loads(_run(LIST_OURS))}
    assert loaded <= FOR_BACKENDS, sorted(loaded - FOR_BACKENDS)


def test_import_loads_only_the_base_packages() -> None:
    """Importing kvstore loads only the base packages and the standard library: no vllm, torch, boto or redis."""
    loaded = set(json.loads(_run(LIST_THEM)))
    assert "kvstore" in loaded
    assert loaded - {"kvstore"} - set(sys.stdlib_module_names) == set()


def test_every_public_name_is_there() -> None:
    """Names loaded at their first use are listed and accessible, and no others."""
    code = """
import kvstore
assert set(kvstore.__all__) <= set(dir(kvstore))
missing = [name for name in kvstore.__all__ if getattr(kvstore, name, None) is None]
assert not missing, missing
assert not hasattr(kvstore, "no_such_name")
"""
    assert _run(code) == ""


def test_foreign_package_named_kvstore_is_reported(tmp_path: Path) -> None:
    """If the index's package named kvstore is installed beside ours, importing raises an error with a solution."""
    (tmp_path / "kvstore").symlink_to(ROOT / "kvstore")
    (tmp_path / "kvstore.py").touch()
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", "import kvstore"], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "pip uninstall kvstore" in done.stderr
