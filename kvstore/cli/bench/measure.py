"""A whole measurement: all systems, runs and phases, as rows of a report."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvstore.cli.bench.driver import Driver, OpCounts, PhaseResult
from kvstore.cli.bench.histogram import Latencies
from kvstore.cli.bench.payload import Payload
from kvstore.cli.bench.systems import Op, RawSystem, System, TierSystem, VllmFsSystem, check_fio, fio_rows
from kvstore.cli.bench.tables import cost_rows
from kvstore.cli.bench.target import Target
from kvstore.cli.bench.workload import Workload
from kvstore.cli.report import Report, Row, median_row
from kvstore.errors import BackendError, ConfigError
from kvstore.namespace import Namespace
from kvstore.primary import Region

BASELINES: Final = ("fio", "vllm-fs", "raw")
_FAILURES: Final = frozenset({"io_error", "timeout", "refused", "cancelled", "corrupt"})
"""Outcomes caused by faults; others (shed, no_space, not_begun) result from limits."""

_REMOVED_AT_ONCE: Final = 4096


def bench_namespace(payload: Payload) -> Namespace:
    """Return the namespace of a measurement's blocks; different payloads have different namespaces.

    Without its fields, so that a server keeps no description of it.
    """
    fields = {"bench": "kvstore-bench", "payload": payload.identity, "block_bytes": payload.block_bytes}
    return Namespace.of_digest(Namespace(fields).digest)


@dataclass(slots=True)
class Measurement:
    """The parameters and results of a measurement."""

    targets: Sequence[Target]  # The tiers' media.
    workloads: Sequence[Workload]  # The phases, for each system.
    baselines: Sequence[str]  # Names of :data:`BASELINES` to measure beside the first tier, on its drive.
    runs: int  # Repetitions of each phase; systems alternate.
    payload: str  # Kind of the bytes.
    stopped: Callable[[], bool]  # Whether Ctrl-C was pressed.
    progress: Callable[[str, PhaseResult | None], None] | None  # Receives progress messages; None without a viewer.
    report: Report  # Receives the rows.
    wrong: list[dict[str, Any]] = field(default_factory=list)  # One row per block that differs from the stored one.
    costs: list[Row] = field(default_factory=list)  # Costs of tiers at services that charge for requests.
    failed: bool = False  # Whether anything failed.
    _groups: dict[tuple[Any, ...], tuple[list[Row], Latencies]] = field(default_factory=dict)
    _done: int = 0

    def run(self) -> None:
        """Measure everything; after an exception the report has all results so far."""
        if "fio" in self.baselines:
            check_fio()
        try:
            for size in dict.fromkeys(workload.block_bytes for workload in self.workloads):
                if self.stopped():
                    break
                workloads = [workload for workload in self.workloads if workload.block_bytes == size]
                self._measure_size(size, workloads)
                self._finish_rows()
                for target in self.targets:
                    target.renew()
        finally:
            self._finish_rows()
            self.report.complete = self.report.complete and not self.stopped()

    def _measure_size(self, size: int, workloads: Sequence[Workload]) -> None:
        """Measure all systems with blocks of one length."""
        payload = Payload(self.payload, size, workloads[0].seed)
        slots = max(workload.slots for workload in workloads)
        with contextlib.ExitStack() as stack:
            region = stack.enter_context(Region.create(slots, size, name="kvstore-bench"))
            rows = payload.prepare(region)
            stack.callback(rows.release)
            drivers: list[tuple[Driver, Target]] = []
            for system, target in self._open(size, region, payload, workloads, stack):
                driver = Driver(system, rows, stopped=self.stopped, watch=self._watch_of(system))
                drivers.append((driver, target))
                if system.looks_up and not target.owned and not target.keep:
                    stack.callback(remove_blocks, driver)
            for _ in range(self.runs):
                for workload in workloads:
                    for driver, target in drivers:
                        if not self.stopped():
                            self._measure_phase(driver, target, workload)
                for workload in {workload.mix: workload for workload in workloads}.values():
                    if "fio" in self.baselines and not self.stopped():
                        self._measure_fio(workload)
            for driver, _ in drivers:
                if workloads[0].verify != "none" and not self.stopped():
                    self._verify(driver, workloads[-1])
            for driver, _ in drivers:
                stats = driver.system.stats()
                if stats is not None:
                    self.costs += cost_rows(driver.system.name, size, stats)

    def _open(
        self, size: int, region: Region, payload: Payload, workloads: Sequence[Workload], stack: contextlib.ExitStack
    ) -> list[tuple[System, Target]]:
        """Open the systems, to be closed by the stack."""
        systems: list[tuple[System, Target]] = []
        names = [f"kvstore-{target.tier.name}" for target in self.targets]
        for i, (name, target) in enumerate(zip(names, self.targets, strict=True), start=1):
            system = TierSystem(
                target.tier.as_config(), region.view(), size, bench_namespace(payload),
                name=f"{name}-{i}" if names.count(name) > 1 else name, direct=target.direct,
            )  # fmt: skip
            stack.callback(system.close)
            systems.append((system, target))
        stored = max(workload.stored_bytes for workload in workloads)
        first = self.targets[0]
        for name in self.baselines:
            if name == "fio":
                continue
            directory = first.scratch()
            if shutil.disk_usage(directory).free < 4 * stored:
                raise ConfigError(
                    f"The baseline {name!r} needs {4 * stored} bytes on {str(directory)!r}, which has fewer free. Give "
                    "a smaller --working-set, or leave it out."
                )
            baseline = self._baseline(name, directory, region, size, stored)
            if first.direct is None:
                baseline.direct = None
            stack.callback(baseline.close)
            systems.append((baseline, first))
        return systems

    def _baseline(self, name: str, directory: Path, region: Region, size: int, stored: int) -> System:
        if name == "raw":
            return RawSystem(directory, region.view(), size, 2 * stored // size)
        # Half of the free space, because this tier never removes anything.
        room = shutil.disk_usage(directory).free // 2
        return VllmFsSystem(directory / f"vllm-fs-{size}", region.view(), size, room)

    def _measure_phase(self, driver: Driver, target: Target, workload: Workload) -> None:
        system = driver.system
        self._tell(f"{system.name}: storing the working set", None)
        filled = driver.fill(workload)
        if self.stopped():
            return
        if not driver.held:
            errors = ", ".join(filled.store.errors) or "nothing was kept"
            raise BackendError(
                f"Nothing could be stored: {errors}. {system.last_error()} Correct that first.", backend=system.name
            )
        if filled.store.errors:
            self._note(f"{system.name}: of the working set, {_listed(filled.store)}. {system.last_error()}".strip())
        cache = _cache(system)
        if workload.cold and cache == "hot":
            cache = "dropped" if target.drop_page_cache() else "hot"
        elif workload.cold and cache is None:
            self._note(f"{system.name}: --cold changes nothing: it is in memory, or on a server.")
        result = driver.run(workload)
        for note in result.notes:
            self._note(note)
        self._take_wrong(system, result)
        base = {
            "bench": "kvstore-bench", "mix": str(workload.mix), "rate": workload.rate, "cache": cache,
            "payload": self.payload.partition(":")[0],
        }  # fmt: skip
        if not (result.store.jobs or result.load.jobs or result.lookup.jobs or self.stopped()):
            self._note(f"{system.name}: no job ended within the measured time. Give a longer --duration.")
        for op in ("store", "load"):
            self._add(base | phase_row(op, result, workload, system), result.counts(op).latencies)
        if result.lookup.jobs:
            lookup = {
                "op": "lookup", "ops_per_s": result.lookup.blocks / result.seconds, "errors": {},
                "hit_rate": result.hits / result.lookup.blocks,
            }  # fmt: skip
            self._add(base | _case(workload, system, result) | lookup, result.lookup.latencies)

    def _measure_fio(self, workload: Workload) -> None:
        directory = self.targets[0].scratch()
        self._tell("fio", None)
        room = shutil.disk_usage(directory).free // 4
        try:
            found = fio_rows(
                directory, block_bytes=workload.block_bytes, store_share=workload.mix.store_share,
                runtime_s=min(workload.duration_s, 10.0), room_bytes=room,
            )  # fmt: skip
        except BackendError:
            # Ctrl-C also reaches fio.
            if self.stopped():
                return
            raise
        for row in found:
            self._add({"bench": "kvstore-bench", "mix": str(workload.mix), "rate": None, **row}, None)

    def _verify(self, driver: Driver, workload: Workload) -> None:
        """Load the whole working set and compare every byte; mark the rows of the system as verified."""
        self._tell(f"{driver.system.name}: comparing every byte", None)
        result = driver.verify(workload)
        self._take_wrong(driver.system, result)
        if self.stopped():
            return
        for (name, *_), (rows, _) in self._groups.items():
            if name == driver.system.name:
                for row in rows:
                    row["verified"] = result.verified_blocks > 0
                    row["verified_blocks"] = row.get("verified_blocks", 0) + result.verified_blocks

    def _take_wrong(self, system: System, result: PhaseResult) -> None:
        for block in result.wrong:
            self.wrong.append({"system": system.name, "key": block.key, "number": block.number, "why": block.why})

    def _add(self, row: Row, latencies: Latencies | None) -> None:
        if row["op"] != "lookup" and not row.get("gb_per_s") and not row.get("errors"):
            return
        self.failed = self.failed or any(name in _FAILURES for name in row.get("errors", {}))
        names = ("system", "host", "op", "block_bytes", "blocks_per_job", "jobs", "mix", "spin", "rate")
        rows, merged = self._groups.setdefault(tuple(row.get(name) for name in names), ([], Latencies()))
        rows.append(row)
        if latencies is not None:
            merged.merge(latencies)

    def _finish_rows(self) -> None:
        """Turn the runs of each phase into one row of the report."""
        found = []
        for rows, merged in self._groups.values():
            errors: dict[str, int] = {}
            for row in rows:
                for name, count in row.get("errors", {}).items():
                    errors[name] = errors.get(name, 0) + count
            row = {**median_row(rows), **merged.as_row(), "errors": errors}
            # Until the final comparison, the blocks compared during the phases count.
            right = not any(block["system"] == row["system"] for block in self.wrong)
            if row["system"] != "fio":
                row["verified"] = right and bool(row.get("verified", row.get("verified_blocks")))
            found.append(row)
        ceilings: dict[tuple[Any, ...], float] = {}
        for row in found:
            if row["system"] in ("fio", "raw"):
                place = (row["op"], row["block_bytes"], row["mix"])
                ceilings[place] = max(ceilings.get(place, 0.0), row["gb_per_s"])
        for row in found:
            ceiling = ceilings.get((row["op"], row["block_bytes"], row["mix"]))
            if ceiling and row.get("gb_per_s"):
                row["of_device"] = row["gb_per_s"] / ceiling
        self.report.rows += found
        self._groups.clear()

    def _watch_of(self, system: System) -> Callable[[PhaseResult], None] | None:
        if self.progress is None:
            return None
        return lambda result: self._tell(system.name, result)

    def _tell(self, what: str, result: PhaseResult | None) -> None:
        if self.progress is not None:
            self.progress(what, result)

    def _note(self, text: str) -> None:
        if text not in self.report.notes:
            self.report.notes.append(text)


def phase_row(op: Op, result: PhaseResult, workload: Workload, system: System) -> Row:
    """Return the results of a phase for stores or loads, without latencies."""
    counts = result.counts(op)
    moved = (result.store.blocks + result.load.blocks) * workload.block_bytes
    row: Row = {
        **_case(workload, system, result),
        "op": op,
        "gb_per_s": counts.blocks * workload.block_bytes / result.seconds / 1e9,
        "ops_per_s": counts.blocks / result.seconds,
        "cpu_s_per_gb": sum(result.cpu_s.values()) / (moved / 1e9) if moved else None,
        "errors": dict(counts.errors),
        "last_error": system.last_error() if counts.errors else None,
    }
    if op == "load":
        row["misses"] = result.misses
        row["verified_blocks"] = result.verified_blocks
    return row


def _case(workload: Workload, system: System, result: PhaseResult) -> Row:
    return {
        "system": system.name, "host": system.host, "block_bytes": workload.block_bytes,
        "blocks_per_job": workload.blocks_per_job, "jobs": workload.jobs, "spin": workload.spin,
        "spin_rate": result.spin_rate,
    }  # fmt: skip


def remove_blocks(driver: Driver) -> None:
    """Remove the stored blocks from a medium that existed before the measurement."""
    keys = driver.stored_keys()
    for at in range(0, len(keys), _REMOVED_AT_ONCE):
        driver.system.remove(keys[at : at + _REMOVED_AT_ONCE])


def _cache(system: System) -> str | None:
    if system.direct is None:
        return None
    return "direct" if system.direct else "hot"


def _listed(counts: OpCounts) -> str:
    return ", ".join(f"{count} blocks {name}" for name, count in counts.errors.items()) + " were not stored"
