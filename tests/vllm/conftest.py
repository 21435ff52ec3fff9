"""Engines of these tests: started once for many tests of a module, because each start takes about ten seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_llama import make_tiny_llama
from tests.vllm.engines import Engine, Start


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama."""
    return make_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def start(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Start engines; at the end of the module all have ended and their files in /dev/shm are gone."""
    engines: list[Engine] = []
    logs = tmp_path_factory.mktemp("logs")

    def start_(**options: Any) -> Engine:
        engine = Engine(model, logs / f"{len(engines)}.log", **options)
        engines.append(engine)
        return engine

    yield start_
    for engine in engines:
        engine.kill()
    assert [engine.shared_memory for engine in engines if engine.shared_memory] == []


@pytest.fixture
def no_rank_files() -> Iterator[None]:
    """Remove vLLM's own files that remain in /dev/shm after engines of several ranks; none of them is ours."""
    found = set(_rank_files())
    yield
    for path in set(_rank_files()) - found:
        path.unlink(missing_ok=True)


def _rank_files() -> Iterator[Path]:
    return Path("/dev/shm").glob("vllm_dist_*")
