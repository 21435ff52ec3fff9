"""fio beside a measurement: the rate of the drive itself."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kvstore.cli.measuring.systems import probe_direct
from kvstore.cli.reporting.report import Row
from kvstore.errors import BackendError, ConfigError

__all__ = ["check_fio", "cpu_s_per_gb", "fio_rows", "run_fio"]

_DEPTH: Final = 32
"""Queue depth: fills the queue of any drive with blocks of 128 KiB."""

_FILE_BYTES: Final = 1 << 30
"""Larger than the cache of most controllers, and written in a second or two."""

_PERCENTILES: Final = {"p50": "50.000000", "p90": "90.000000", "p99": "99.000000", "p99_9": "99.900000"}
_GRACE_S: Final = 120.0
"""Time in addition to the runtime, because fio first writes the whole file."""


def check_fio() -> None:
    """Refuse to start without fio.

    Raises:
        ConfigError: It is not installed.
    """
    if shutil.which("fio") is None:
        raise ConfigError("The baseline 'fio' needs fio, which is not installed. Install its package, or use 'raw'.")


def fio_rows(
    directory: Path, *, block_bytes: int, store_share: float, runtime_s: float, room_bytes: int = _FILE_BYTES
) -> list[Row]:
    """Measure with fio: direct I/O at random places of one file, 32 at once.

    Args:
        directory: Directory of the file, which is removed at the end.
        block_bytes: Length of each operation.
        store_share: Share of writes, 0 to 1.
        runtime_s: Duration, after the file has been written.
        room_bytes: Bytes that the file may take.

    Raises:
        BackendError: fio failed; the text has its message.
    """
    path = directory / "fio.dat"
    size = max(block_bytes * _DEPTH, min(_FILE_BYTES, room_bytes) // block_bytes * block_bytes)
    kind = "randwrite" if store_share == 1 else "randread" if store_share == 0 else "randrw"
    direct = probe_direct(directory)
    failure: BackendError
    try:
        for engine in ("io_uring", "libaio", "psync"):
            options = [
                f"--filename={path}", f"--size={size}", f"--bs={block_bytes}", "--thread", f"--rw={kind}",
                f"--rwmixwrite={round(100 * store_share)}", f"--direct={int(direct)}", f"--ioengine={engine}",
                f"--iodepth={_DEPTH}", "--time_based", f"--runtime={runtime_s:g}", "--norandommap", "--randrepeat=1",
            ]  # fmt: skip
            try:
                return _rows_of(run_fio(options, runtime_s), block_bytes, engine, direct)
            except BackendError as error:
                failure = error
    finally:
        path.unlink(missing_ok=True)
    raise failure


def run_fio(
    options: Sequence[str], runtime_s: float, *, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run one job of fio; return its part of fio's JSON.

    Args:
        options: Of the job.
        runtime_s: How long it measures; fio gets some minutes more to lay out its file.
        environment: More environment variables.

    Raises:
        BackendError: fio failed; the text has its last line.
    """
    try:
        done = subprocess.run(
            ["fio", "--name=ceiling", *options, "--output-format=json"], capture_output=True, text=True, check=False,
            timeout=runtime_s + _GRACE_S, stdin=subprocess.DEVNULL, env={**os.environ, **(environment or {})},
        )  # fmt: skip
        if done.returncode == 0:
            # fio prints its fallbacks in front of the JSON.
            job: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
            return job
        failure = ((done.stderr or done.stdout).strip().splitlines() or [""])[-1]
    except (subprocess.TimeoutExpired, ValueError, OSError) as error:
        failure = f"{type(error).__name__}: {error}"
    raise BackendError(f"fio failed: {failure}. Run it by hand: fio {' '.join(options)}", backend="fio")


def cpu_s_per_gb(job: Mapping[str, Any]) -> float:
    """Return the CPU seconds of a job of fio for 1e9 bytes."""
    cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    return float(cpu_s / ((job["read"]["io_bytes"] + job["write"]["io_bytes"]) / 1e9))


def _rows_of(job: dict[str, Any], block_bytes: int, engine: str, direct: bool) -> list[Row]:
    rows = []
    for op, side in (("store", "write"), ("load", "read")):
        found = job[side]
        if not found["io_bytes"]:
            continue
        percentiles = found["clat_ns"].get("percentile", {})
        latencies = {
            f"latency_s_{name}": percentiles[text] / 1e9 for name, text in _PERCENTILES.items() if text in percentiles
        }
        rows.append(
            {
                "system": "fio", "host": "process", "op": op, "block_bytes": block_bytes, "blocks_per_job": 1,
                "jobs": _DEPTH, "spin": False, "engine": engine, "cache": "direct" if direct else "hot",
                "gb_per_s": found["bw_bytes"] / 1e9, "ops_per_s": found["iops"], "cpu_s_per_gb": cpu_s_per_gb(job),
                **latencies, "latency_s_max": found["clat_ns"]["max"] / 1e9, "errors": {},
            }
        )  # fmt: skip
    return rows
