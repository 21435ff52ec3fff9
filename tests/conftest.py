"""Shared by the tests of all areas: waiting for a condition, repeatable randomness, and real engines."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from examples.tiny_llama import make_tiny_llama
from kvstore.testing import eventually as _eventually
from kvstore.testing.seeds import SEED_VARIABLE, fresh_seed
from tests.vllm.engines import Engine, Start

# The time to draw and run an example depends on the machine, so it is not limited. With a given seed the examples are
# the same in each run, too.
settings.register_profile(
    "kvstore",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=SEED_VARIABLE in os.environ,
    print_blob=True,
)
settings.load_profile("kvstore")

# A shell ignores SIGINT in background processes, and children inherit that; some tests send SIGINT.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _same_variables() -> Iterator[None]:
    """Fail a test that leaves a variable changed, which would configure later tests and the engines that they start."""
    before = _variables()
    yield
    changed = sorted({name for name, _ in before ^ _variables()})
    assert changed == [], f"variables left changed: {changed}"


def _variables() -> set[tuple[str, str]]:
    """Return the variables that configure kvstore, vLLM and S3."""
    return {each for each in os.environ.items() if each[0].startswith(("KVSTORE_", "VLLM_", "AWS_"))}


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Return ``kvstore.testing.eventually``: waits until a predicate is true, up to ``timeout_s``."""
    return _eventually


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> Iterator[random.Random]:
    """Return a source of randomness; a failure prints the variable that repeats it."""
    seed = fresh_seed()
    # Captured by pytest, which shows it when the test fails.
    print(f"{request.node.name}: repeat it with {SEED_VARIABLE}={seed}")
    yield random.Random(seed)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama."""
    return make_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine without offloading, whose answers are the expected ones; other tests may have asked it the same."""
    engine = Engine(model, tmp_path_factory.mktemp("plain") / "log")
    yield engine
    engine.kill()


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
