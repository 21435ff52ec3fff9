"""The region of a real vLLM: in huge pages, and nothing in /dev/shm after a killed start."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvstore.errors import ConfigError, KVStoreError
from kvstore.primary import Region
from kvstore.testing.waiting import eventually
from kvstore.vllm.compat import open_region
from kvstore.vllm.connector import EngineContext
from kvstore.vllm.region import region_path, use_locked_region
from kvstore.vllm.spec import KVStoreOffloadingSpec
from tests.vllm.engine_config import engine
from tests.vllm.engines import ROOT, EngineError, Start, prompt
from tests.vllm.harness import make_spec, offloading_config

_REGION_BYTES = 64 << 20


def _offloading(directory: Path, size_bytes: int = _REGION_BYTES, **more: Any) -> dict[str, Any]:
    tier = {"type": "file", "path": str(directory), "capacity": "1GiB"}
    spec = {"spec_name": "KVStoreOffloadingSpec", "spec_module_path": "kvstore.vllm"}
    return {**spec, "cpu_bytes_to_use": size_bytes, "secondary_tiers": [tier], **more}


@pytest.mark.engine
@pytest.mark.timeout(600)
@pytest.mark.parametrize("options", [{}, {"manager": "vllm"}, {"huge_pages": False}])
def test_the_region_of_an_engine_lies_in_huge_pages(start: Start, tmp_path: Path, options: dict[str, Any]) -> None:
    """Under both managers, the whole region is in huge pages, unless they are off; a gauge and the log say it."""
    with Region.create(2, 1 << 20, populate=True) as region:
        if not region.huge_bytes:
            pytest.skip("this kernel makes no huge pages on request")
    started = start(offloading=_offloading(tmp_path, **options), in_process=False)
    started.ask(prompt(1, 200))
    metrics = started.call("metrics")
    pages = {kind: metrics[f"vllm:kvstore_primary_bytes{{{kind}}}"] for kind in ("huge", "small")}
    assert 0.9 * _REGION_BYTES < sum(pages.values()) <= _REGION_BYTES  # In whole rows.
    assert pages["small" if options.get("huge_pages", True) else "huge"] == 0
    assert "in huge pages" in started.text()
    started.close()


@pytest.mark.parametrize("spec_class", [KVStoreOffloadingSpec, TieringOffloadingSpec])
def test_a_scheduler_makes_no_region_beside_that_of_its_workers(spec_class: Any, tmp_path: Path) -> None:
    """If a program removes the region's file during the start, the start fails: tiers would store other memory."""
    config = offloading_config([{"type": "file", "path": str(tmp_path), "capacity": "64MiB"}])
    if spec_class is TieringOffloadingSpec:
        tier = {"type": "KVStoreTier", "module_path": "kvstore.vllm", "backend": "file"}
        config.extra_config["secondary_tiers"][0] |= tier
    use_locked_region(config.engine_id, huge_pages=True, has_workers=True)
    with EngineContext(engine()).entered():
        spec = spec_class(config)
        worker = open_region(spec, rank=0)
        Path(worker.mmap_path).unlink()
        worker._creator = False
        try:
            with pytest.raises(KVStoreError, match="removed during the start"):
                spec.get_manager()
            assert not Path(region_path(config.engine_id)).exists()
        finally:
            worker.cleanup()


def test_a_region_that_can_not_be_allocated_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shortage of memory in the process that made the file removes it, and the log has the remedy."""
    spec = make_spec(offloading_config([{"type": "file", "path": str(tmp_path), "capacity": "64MiB"}]))

    def refused(*_: Any, **__: Any) -> int:
        raise ConfigError("It does not fit.")

    monkeypatch.setattr("kvstore.vllm.region.allocate", refused)
    with pytest.raises(ConfigError, match="does not fit"):
        open_region(spec, rank=0)
    assert not Path(region_path(spec.config.engine_id)).exists()


NEXT_SERVER = """
import json, sys
from pathlib import Path
from examples.serving import Server
from kvstore.vllm.region import region_path
from tests.vllm.engines import prompt

model, work, offloading, *paths = sys.argv[1:]
server = Server("served", Path(model), Path(work), offloading=json.loads(offloading))
try:
    server.wait_ready()
    answered = server.complete(prompt(1, 100), 4).prompt_tokens
    print(answered, [path for path in (*paths, region_path(server.engine_id)) if Path(path).exists()])
finally:
    server.kill()
"""
"""Starts `vllm serve`, and prints the length of the prompt that it answered, and the existing paths."""


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_starts_that_are_killed_leave_nothing(start: Start, model: Path, tmp_path: Path) -> None:
    """After five workers were killed during the allocation, the next `vllm serve` removes their files, and answers."""
    paths: set[Path] = set()

    def regions() -> set[Path]:
        return set(Path("/dev/shm").glob(f"*kvstore-test-{os.getpid()}-*")) - paths

    with ThreadPoolExecutor() as threads:
        for _ in range(5):
            starting = threads.submit(start, offloading=_offloading(tmp_path / "kv", 1 << 30), in_process=False)
            eventually(regions, 300, "the allocation")
            (path,) = regions()
            for descriptors in Path("/proc").glob("[0-9]*/fd"):
                with contextlib.suppress(OSError):
                    if any(os.path.samefile(fd, path) for fd in descriptors.iterdir() if fd.exists()):
                        os.kill(int(descriptors.parent.name), signal.SIGKILL)
            with pytest.raises(EngineError):
                starting.result()
            # An engine of another test may start now, and remove it.
            paths.add(path)
    program = tmp_path / "next_server.py"
    program.write_text(NEXT_SERVER)
    arguments = [str(model), str(tmp_path), json.dumps(_offloading(tmp_path / "kv")), *map(str, paths)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.preloaded", str(program), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=800,
    )
    assert done.stdout.splitlines()[-1] == "100 []"
