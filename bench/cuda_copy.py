"""Copies of KV cache blocks between GPU (or host memory) and slots, compared with plain copies of the same bytes.

A job has 64 blocks of 2 MiB, each of 32 layers in separate tensors, like those of a model with 8 KV heads of 128
bfloat16 elements and 16 tokens per block. Blocks and slots are in random order. Copies within host memory are measured
idle and beside a thread that spins in Python; with a GPU, also copies to pinned and unpinned memory, each in huge pages
and in pages of 4 KiB. Every byte is compared at the end.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench.common import Row, arguments, in_turns, median_row, needs, reporting, runs_of

needs("torch")

import numpy as np
import torch

from bench.clients import beside_spinner
from kvstore.primary import GroupLayout, KVLayout, Region, attention_layer
from kvstore.runtime.messages import JobKind
from kvstore.transfer import BlockCopies, HostTransfer, Transfer
from kvstore.transfer.cuda import CudaTransfer
from kvstore.transfer.pinning import PinnedRegion

LAYERS, KV_HEADS, HEAD_BYTES, BLOCK_TOKENS = 32, 8, 128 * 2, 16
COLUMNS = [
    "system",
    "op",
    "pinned",
    "huge_pages",
    "spin",
    "block_bytes",
    "blocks_per_job",
    "gb_per_s",
    "of_plain",
    "spin_rate",
    "verified",
    "runs",
]
WAIT_S = 120.0

Run = Callable[[], float]


class Bench:
    """A KV cache on a device, a region, and the same copies by different systems.

    Args:
        device: Device of the KV cache.
        count: Blocks of a job.
        pinned: Whether the region is pinned.
        huge_pages: Whether to allocate the region in huge pages.
    """

    def __init__(self, device: torch.device, count: int, *, pinned: bool, huge_pages: bool) -> None:
        self.device, self.count, self.pinned = device, count, pinned
        names = [f"layers.{i}" for i in range(LAYERS)]
        layers = tuple(
            attention_layer(name, kv_heads=KV_HEADS, key_bytes=HEAD_BYTES, block_tokens=BLOCK_TOKENS) for name in names
        )
        self.plan = KVLayout((GroupLayout(layers, BLOCK_TOKENS),)).plan(1, 0)
        self.block_bytes = self.plan.slot_bytes
        page = layers[0].local_bytes(1)
        generator = torch.Generator().manual_seed(1)
        shape = (2 * count, page)
        self.truth = {n: torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator) for n in names}
        self.cache = {name: pages.clone().to(device) for name, pages in self.truth.items()}
        self.region = Region.create(2 * count, self.block_bytes, populate=True, huge_pages=huge_pages)
        self.pins = PinnedRegion(self.region) if pinned else None
        self.rows = self.region.rows()
        order = np.random.default_rng(2)
        self.blocks, self.slots = order.permutation(2 * count)[:count], order.permutation(2 * count)[:count]
        self.flat = torch.zeros(count * self.block_bytes, dtype=torch.uint8, device=device)

    def close(self) -> None:
        del self.rows
        if self.pins is not None:
            self.pins.close()
        self.region.close()

    def transfer_run(self, transfer: Transfer, kind: JobKind) -> Run:
        """Return a function that times one job of a transfer, from submit to its end."""

        def run() -> float:
            self.synchronize()
            begun = time.perf_counter()
            transfer.submit([BlockCopies.of(self.blocks, self.slots)], kind)
            if not transfer.wait(timeout_s=WAIT_S) or not all(result.success for result in transfer.poll()):
                raise RuntimeError("a job failed")
            return time.perf_counter() - begun

        return run

    def plain_run(self, kind: JobKind) -> Run:
        """Return a function that times one plain copy of as many bytes, contiguous on both sides: the upper bound."""
        host = torch.from_numpy(self.rows[: self.count].reshape(-1))

        def run() -> float:
            self.synchronize()
            begun = time.perf_counter()
            target, source = (host, self.flat) if kind is JobKind.STORE else (self.flat, host)
            target.copy_(source, non_blocking=True)
            self.synchronize()
            return time.perf_counter() - begun

        return run

    def page_run(self, kind: JobKind) -> Run:
        """Return a function that times copies page by page, with one call each: the simplest implementation."""
        host = torch.from_numpy(self.rows)
        pairs = list(zip(self.blocks.tolist(), self.slots.tolist(), strict=True))

        def run() -> float:
            self.synchronize()
            begun = time.perf_counter()
            for layer, pages in zip(self.plan.groups[0], self.cache.values(), strict=True):
                part = slice(layer.slot_offset, layer.slot_offset + layer.block_bytes)
                for block, slot in pairs:
                    if kind is JobKind.STORE:
                        host[slot, part].copy_(pages[block], non_blocking=True)
                    else:
                        pages[block].copy_(host[slot, part], non_blocking=True)
            self.synchronize()
            return time.perf_counter() - begun

        return run

    def verify(self, run: Run, kind: JobKind) -> bool:
        """Make one run into wiped targets and compare every byte, including bytes that must not change."""
        whole = torch.cat(list(self.truth.values()), dim=1).numpy()
        order = np.argsort(self.slots)
        others = np.setdiff1d(np.arange(2 * self.count), self.slots)
        unused = np.setdiff1d(np.arange(2 * self.count), self.blocks)
        for name, pages in self.cache.items():
            pages.copy_(self.truth[name])
        self.rows[:] = 7
        if kind is JobKind.LOAD:
            self.rows[self.slots] = whole[self.blocks]
            for pages in self.cache.values():
                pages.zero_()
        run()
        if kind is JobKind.STORE:
            same = bool((self.rows[self.slots[order]] == whole[self.blocks[order]]).all())
            return same and bool((self.rows[others] == 7).all())
        return all(
            torch.equal(pages.cpu()[self.blocks], self.truth[name][self.blocks]) and not pages.cpu()[unused].any()
            for name, pages in self.cache.items()
        )

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def measure(bench: Bench, transfers: dict[str, Transfer], runs: int, *, spin: bool) -> list[Row]:
    """Return the rows of all systems on one bench."""
    size = bench.count * bench.block_bytes
    systems: dict[tuple[str, JobKind], Run] = {}
    for kind in JobKind:
        systems["plain-copy", kind] = bench.plain_run(kind)
        systems["page-by-page", kind] = bench.page_run(kind)
        systems |= {(name, kind): bench.transfer_run(transfer, kind) for name, transfer in transfers.items()}

    def row_of(name: str, kind: JobKind) -> Row:
        with beside_spinner(spin) as spun:
            seconds = systems[name, kind]()
        return {
            "bench": "cuda_copy", "system": name, "op": kind.value, "spin": spin,
            "pinned": bench.pinned, "huge_pages": bench.region.huge_bytes == bench.region.size_bytes,
            "block_bytes": bench.block_bytes, "blocks_per_job": bench.count, "gb_per_s": size / seconds / 1e9, **spun,
        }  # fmt: skip

    turns = {f"{name} {kind}": partial(row_of, name, kind) for name, kind in systems}
    rows = [median_row(found) for found in in_turns(runs, turns, warm_up=True).values()]
    plain = {row["op"]: row["gb_per_s"] for row in rows if row["system"] == "plain-copy"}
    for row, (case, run) in zip(rows, systems.items(), strict=True):
        row["of_plain"] = row["gb_per_s"] / plain[row["op"]]
        if row["system"] != "plain-copy":
            row["verified"] = bench.verify(run, case[1])
    return rows


def on_cuda(count: int, runs: int) -> list[Row]:
    """Measure on the first GPU, with pinned and unpinned memory, in huge pages and small ones."""
    rows: list[Row] = []
    for pinned, huge_pages in itertools.product((True, False), (True, False)):
        bench = Bench(torch.device("cuda"), count, pinned=pinned, huge_pages=huge_pages)
        if bench.pins is not None and not bench.pins.pinned:
            print(f"The region could not be pinned: {bench.pins.reason}. No pinned rows.", file=sys.stderr)
            bench.close()
            continue
        transfer = CudaTransfer(bench.plan, bench.cache, bench.region, pin=False)
        rows += measure(bench, {"kvstore-cuda": transfer}, runs, spin=False)
        transfer.close()
        del transfer
        bench.close()
    return rows


def on_host(count: int, runs: int, spins: Sequence[bool]) -> list[Row]:
    """Measure within host memory."""
    rows: list[Row] = []
    bench = Bench(torch.device("cpu"), count, pinned=False, huge_pages=True)
    arrays = {name: pages.numpy() for name, pages in bench.cache.items()}
    transfers: dict[str, Transfer] = {"kvstore-host": HostTransfer(bench.plan, arrays, bench.region)}
    for spin in spins:
        rows += measure(bench, transfers, runs, spin=spin)
    for transfer in transfers.values():
        transfer.close()
    del transfer, transfers, arrays
    bench.close()
    return rows


def main() -> None:
    """Measure and print, also the reasons for missing rows; exit with 1 if a byte was wrong."""
    parser = arguments(__doc__)
    parser.add_argument("--no-spin", action="store_true", help="nothing beside a thread that spins in Python")
    options = parser.parse_args()
    count, runs = (16, 3) if options.quick else (64, 9)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    with reporting(options, COLUMNS, device=device, torch=torch.__version__, cuda=torch.version.cuda) as rows:
        rows += on_host(count, runs_of(options, runs, runs), [False] if options.no_spin else [False, True])
        if device is None:
            print("No CUDA device here (torch.cuda.is_available() is false): host memory only.\n")
        else:
            rows += on_cuda(count, runs_of(options, runs, runs))
    if not all(row.get("verified", True) for row in rows):
        sys.exit("Bytes were wrong.")


if __name__ == "__main__":
    main()
