"""Other people's programs, downloaded once into the virtual environment, below ``outside/``."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
CACHE = Path(sys.prefix) / "outside"
VERSION = "0.33.0"
VLLM = CACHE / f"vllm-{VERSION}"
MULTI_TURN = VLLM / "benchmarks" / "multi_turn"

_PARTS = (
    "tests/__init__.py",
    "tests/utils.py",
    "tests/v1/__init__.py",
    "tests/v1/kv_offload/",
    "tests/v1/kv_connector/",
    "benchmarks/multi_turn/",
)
LMCACHE = ("lmcache==0.5.6",)
LMCACHE_MORE = ("lmcache-rust-raw-block-io==0.5.7rc2", "awscrt==0.38.1", "aiofile==3.12.3", "caio==0.12.10")
"""What its adapters for raw devices and S3 need; of the first there is no earlier version."""
SGLANG = ("sglang==0.5.23", "orjson==3.13.0", "ipython==9.18.1", "traitlets==5.16.1", "gguf==0.19.0")
_GENERATORS = ("guidellm==0.8.1", "pandas==3.1.1")
_ATTEMPTS = 3


def vllm_tests() -> Path:
    """Download and unpack vLLM's tests and load generators, unless they are there, with the tiny model that tests name.

    Returns:
        The root of the part of vLLM's repository that is needed.
    """
    if MULTI_TURN.is_dir():
        return VLLM
    shutil.rmtree(VLLM, ignore_errors=True)  # Of an earlier version of this module, with fewer parts.
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        _pip(sys.executable, "download", "--no-deps", "--no-binary", "vllm", "--dest", scratch, f"vllm=={VERSION}")
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
        made.rename(VLLM)
    return VLLM


def packages(names: tuple[str, ...]) -> Path:
    """Install packages, but not their dependencies, into a folder of their own, unless it is there."""
    folder = CACHE / names[0].replace("==", "-")
    if not folder.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            made = Path(scratch) / "made"
            options = ("--no-deps", "--no-compile", "--only-binary", ":all:", "--target", str(made))
            _pip(sys.executable, "install", *options, *names)
            made.rename(folder)
    return folder


def generators() -> Path:
    """Install the load generators, which need other versions of packages than vLLM does, unless they are there.

    Returns:
        The Python of a virtual environment that also sees the packages of this one.
    """
    home = CACHE / "generators"
    stamp = home / "-".join(_GENERATORS + LMCACHE)
    if not stamp.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        site = home / "lib" / version / "site-packages"
        (site / "outer.pth").write_text(f"{sysconfig.get_path('purelib')}\n{packages(LMCACHE)}\n")
        _pip(home / "bin" / "python", "install", *_GENERATORS)
        stamp.touch()
    return home / "bin" / "python"


def _pip(python: str | Path, *arguments: str) -> None:
    """Run pip, again if it fails, because downloads do."""
    for attempt in range(_ATTEMPTS):
        time.sleep(5 * attempt)
        if subprocess.run([python, "-m", "pip", "--quiet", *arguments], check=False).returncode == 0:
            return
    raise SystemExit(f"outside: pip {' '.join(arguments)} failed")
