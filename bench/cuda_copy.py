"""Copies of KV cache blocks between GPU (or host memory) and slots, against plain copies of the same bytes.

64 blocks of 2 MiB, each of 32 layers that are separate tensors, as of a model with 8 KV heads of 128 bfloat16 elements
and 16 tokens a block. Blocks and slots are in random order. On a GPU, pinned and not; without one, in host memory only,
idle and with a thread that computes in Python beside it. Every byte is compared in the end.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from bench.common import Row, arguments, beside_spinner, median_row, print_table, write_json
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
        device: Where the KV cache lies.
        count: Blocks of a job.
        pinned: Whether the region is pinned.
    """

    def __init__(self, device: torch.device, count: int, *, pinned: bool) -> None:
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
        self.region = Region.create(2 * count, self.block_bytes, populate=True)
        self.pins = PinnedRegion(self.region) if pinned else None
        self.rows = self.region.rows()
        order = np.random.default_rng(2)
        self.blocks, self.slots = order.permutation(2 * count)[:count], order.permutation(2 * count)[:count]
        self.flat = torch.zeros(count * self.block_bytes, dtype=torch.uint8, device=device)

    def close(self) -> None:
        """Give the memory back."""
        del self.rows
        if self.pins is not None:
            self.pins.close()
        self.region.close()

    def transfer_run(self, transfer: Transfer, kind: JobKind) -> Run:
        """Return a run of one job by a transfer, from submit to its end."""

        def run() -> float:
            self.synchronize()
            begun = time.perf_counter()
            transfer.submit([BlockCopies.of(self.blocks, self.slots)], kind)
            if not transfer.wait(timeout_s=WAIT_S) or not all(result.success for result in transfer.poll()):
                raise RuntimeError("a job failed")
            return time.perf_counter() - begun

        return run

    def plain_run(self, kind: JobKind) -> Run:
        """Return a run of one plain copy of as many bytes, contiguous on both sides: the ceiling."""
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
        """Return a run that copies page by page, with a call for each: what one would write first."""
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
        """Make one run from wiped targets and compare every byte, also of what must not have changed."""
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
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def measure(bench: Bench, transfers: dict[str, Transfer], runs: int, *, spin: bool) -> list[Row]:
    """Return the rows of all systems on one bench: interleaved runs, medians."""
    systems: dict[tuple[str, JobKind], Run] = {}
    for kind in JobKind:
        systems["plain-copy", kind] = bench.plain_run(kind)
        systems["page-by-page", kind] = bench.page_run(kind)
        systems |= {(name, kind): bench.transfer_run(transfer, kind) for name, transfer in transfers.items()}
    size = bench.count * bench.block_bytes
    found: dict[tuple[str, JobKind], list[Row]] = {}
    for number in range(runs + 1):
        for (name, kind), run in systems.items():
            with beside_spinner(spin) as spinner:
                seconds = run()
            row: Row = {"bench": "cuda_copy", "system": name, "op": kind.value, "pinned": bench.pinned, "spin": spin}
            row |= {"block_bytes": bench.block_bytes, "blocks_per_job": bench.count, "gb_per_s": size / seconds / 1e9}
            row |= spinner
            if number:  # The first run of each only warms up.
                found.setdefault((name, kind), []).append(row)
    rows = []
    for (name, kind), several in found.items():
        row = median_row(several)
        row["of_plain"] = row["gb_per_s"] / median_row(found["plain-copy", kind])["gb_per_s"]
        if name != "plain-copy":
            row["verified"] = bench.verify(systems[name, kind], kind)
        rows.append(row)
    return rows


def on_cuda(count: int, runs: int) -> list[Row]:
    """Measure on the first GPU, pinned and not."""
    rows: list[Row] = []
    for pinned in (True, False):
        bench = Bench(torch.device("cuda"), count, pinned=pinned)
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


def on_host(count: int, runs: int) -> list[Row]:
    """Measure within host memory, by both ways that the host transfer has."""
    rows: list[Row] = []
    bench = Bench(torch.device("cpu"), count, pinned=False)
    arrays = {name: pages.numpy() for name, pages in bench.cache.items()}
    transfers: dict[str, Transfer] = {
        "kvstore-host": HostTransfer(bench.plan, arrays, bench.region),
        "kvstore-host-numpy": HostTransfer(bench.plan, arrays, bench.region, vectored=False),
        "kvstore-host-inline": HostTransfer(bench.plan, arrays, bench.region, threaded=False),
    }
    for spin in (False, True):
        rows += measure(bench, transfers, runs, spin=spin)
    for transfer in transfers.values():
        transfer.close()
    del transfer, transfers, arrays
    bench.close()
    return rows


def main() -> None:
    """Measure, print, say what could not be measured; exit with 1 if a byte was wrong."""
    parser = arguments(__doc__.splitlines()[0])
    options = parser.parse_args()
    count, runs = (16, 3) if options.quick else (64, 9)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    rows = on_host(count, runs)
    if device is None:
        print("No CUDA device here (torch.cuda.is_available() is false): host memory only, nothing is said of a GPU.\n")
    else:
        rows += on_cuda(count, runs)
    print_table(rows, COLUMNS)
    if device is not None:
        print(f"\nGPU rows: {device}, CUDA {torch.version.cuda}, torch {torch.__version__}")
    write_json(options.json, rows, device=device, torch=torch.__version__)
    if not all(row.get("verified", True) for row in rows):
        sys.exit("Bytes were wrong.")


if __name__ == "__main__":
    main()
