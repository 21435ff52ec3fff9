"""What codecs and seals make of KV blocks, and what that costs: ratio, rate each way, and how much of it frees the GIL.

    python bench/codec.py [--quick] [--runs N] [--dtypes bf16,fp8] [--checkpoint DIR] [--json FILE]

Measured is what a tier does with a batch of 4 MiB on one of its two worker threads, memory to memory: ``encode`` is
codecs, seal, checksum and header; ``decode`` is all checks, opening and decoding. So ``raw`` is the checksum alone.
Beside it stand ``zstandard`` (the package's own calls, a block each, nothing else) and ``blosc2`` (shuffle and
bitshuffle with zstd inside, one thread). Every decode is compared with the block.

``gb_per_s`` is plain bytes by wall time of one thread; ``cpu_s_per_gb`` counts all threads of the process. ``gil_free``
is the share of that wall time in which the work does not hold the GIL. It is measured with a thread beside that counts
in Python, and so holds the GIL whenever the work does not: from its count follows for how long that was, and what is
left of the time is the work's. It takes two idle cores; on a busy machine it says nothing.

The blocks come from bench/kv_tensors.py, which says what they imitate.
"""

from __future__ import annotations

import argparse
import mmap
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import blosc2
import numpy as np
import zstandard

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.common import Row, arguments, median_row, print_table, write_json
from bench.kv_tensors import DTYPES, kv_blocks
from kvstore import Namespace
from kvstore.codec.decoder import StoredBlock
from kvstore.codec.encoder import Encoder
from kvstore.codec.keyring import new_document
from kvstore.codec.record import HEADER_BYTES, RecordCodec
from kvstore.tiers.codecs import TierCodecs

COLUMNS = ["dtype", "system", "op", "ratio", "gb_per_s", "cpu_s_per_gb", "gil_free", "verified", "runs"]
LEVELS = (-5, 1, 3)
BATCH_BYTES = 4 << 20
SWITCH_S = 50e-6
"""Switch interval while the GIL is measured: with the usual 5 ms, to wait for it would take longer than the work."""
NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "float8_e4m3fn"}

Buffers = list[memoryview]


class System(ABC):
    """Something that encodes and decodes the blocks of a batch.

    Attributes:
        name: Its name in rows.
        ratio: Stored by plain bytes of the last encode.
    """

    name: str
    ratio = 1.0

    @abstractmethod
    def encode(self) -> None:
        """Encode all blocks."""

    @abstractmethod
    def prepare_decode(self) -> None:
        """Put what is to be decoded where a load would have put it; not measured."""

    @abstractmethod
    def decode(self) -> None:
        """Decode all blocks."""

    @abstractmethod
    def verify(self) -> bool:
        """Tell whether the last decode gave the blocks."""


class Kvstore(System):
    """A tier's own encoder and decoder, with all that they do to a batch."""

    def __init__(self, name: str, config: Any, blocks: np.ndarray, dtype: str) -> None:
        self.name = f"kvstore {name}"
        namespace = Namespace({"bench": "codec", "dtype": NAMES[dtype]})
        self._codecs = TierCodecs(config, namespace)
        self._records = RecordCodec(namespace, header_bytes=HEADER_BYTES)
        self._encoder = Encoder(self._records, self._codecs.chain)
        count, size = blocks.shape
        self._plain = blocks
        self._keys = [b"%032d" % i for i in range(count)]
        self._headers = rows(count, HEADER_BYTES)
        self._blocks, self._targets, self._spares, self._slots = (rows(count, size) for _ in range(4))
        self._lower, self._upper = rows(count, size), rows(count, size)
        for view, block in zip(self._blocks, blocks, strict=True):
            view[:] = block
        self._payloads: Buffers = []

    def encode(self) -> None:
        """Make the records of all blocks."""
        made = self._encoder.encode(
            self._keys, self._headers, self._blocks, self._targets, self._spares, encode=bool(self._codecs.chain.codecs)
        )
        self._payloads = [payload for payload in made.payloads if payload is not None]
        self.ratio = made.stored_bytes / self._plain.nbytes

    def prepare_decode(self) -> None:
        """Put the payloads into slots."""
        for slot, payload in zip(self._slots, self._payloads, strict=True):
            slot[: payload.nbytes] = payload

    def decode(self) -> None:
        """Check all records, and decode those that are encoded, in their slots."""
        refusal = self._codecs.decoder.refusal
        stored = []
        for key, header, slot, payload in zip(self._keys, self._headers, self._slots, self._payloads, strict=True):
            found = self._records.check(key, header, slot, HEADER_BYTES + payload.nbytes, refusal)
            if found.codec_chain:
                stored.append(StoredBlock(found, slot))
        if stored:
            self._codecs.decoder.decode(stored, self._lower[: len(stored)], self._upper[: len(stored)])

    def verify(self) -> bool:
        """Compare slots and blocks."""
        return all(slot == block.data for slot, block in zip(self._slots, self._plain, strict=True))


class Calls(System):
    """A package's own two calls, block by block."""

    def __init__(
        self, name: str, encode: Callable[[Any], bytes], decode: Callable[[bytes], Any], blocks: np.ndarray
    ) -> None:
        self.name = name
        self._encode, self._decode = encode, decode
        self._plain = list(blocks)
        self._encoded: list[bytes] = []
        self._decoded: list[Any] = []

    def encode(self) -> None:
        """Encode all blocks."""
        self._encoded = [self._encode(block) for block in self._plain]
        self.ratio = sum(map(len, self._encoded)) / sum(block.nbytes for block in self._plain)

    def prepare_decode(self) -> None:
        """Nothing to do."""

    def decode(self) -> None:
        """Decode all blocks."""
        self._decoded = [self._decode(data) for data in self._encoded]

    def verify(self) -> bool:
        """Compare."""
        return all(bytes(one) == two.tobytes() for one, two in zip(self._decoded, self._plain, strict=True))


def rows(count: int, size: int) -> Buffers:
    """Return rows of page-aligned memory, one behind the other, as a tier's slots are."""
    whole = memoryview(mmap.mmap(-1, count * size))
    return [whole[i * size : (i + 1) * size] for i in range(count)]


def make_systems(blocks: np.ndarray, dtype: str, keyring: Path) -> list[System]:
    """Return all systems over the same blocks."""
    width = DTYPES[dtype]
    keys = {"keys": {"file": str(keyring)}}
    configs: dict[str, Any] = {"raw": "raw", "mac": [{"mac": keys}], "aead": [{"aead": keys}]}
    configs |= {f"zstd:{level}": f"zstd:{level}" for level in LEVELS}
    if width > 1:
        configs |= {f"byteplane+zstd:{level}": f"byteplane+zstd:{level}" for level in LEVELS}
    configs["byteplane+zstd:1+aead"] = ["byteplane", "zstd:1", {"aead": keys}]
    systems: list[System] = [Kvstore(name, config, blocks, dtype) for name, config in configs.items()]
    for level in LEVELS:
        compressor, decompressor = zstandard.ZstdCompressor(level=level), zstandard.ZstdDecompressor()
        systems.append(Calls(f"zstandard:{level}", compressor.compress, decompressor.decompress, blocks))
    for kind, filters in (("shuffle", blosc2.Filter.SHUFFLE), ("bitshuffle", blosc2.Filter.BITSHUFFLE)):
        params = {"codec": blosc2.Codec.ZSTD, "clevel": 1, "typesize": width, "filters": [filters], "nthreads": 1}
        systems.append(Calls(f"blosc2 {kind}+zstd:1", packer(params), blosc2.decompress2, blocks))
    return systems


def packer(params: dict[str, Any]) -> Callable[[Any], bytes]:
    """Return blosc2's call with its parameters."""
    return lambda block: blosc2.compress2(block, **params)


class Spinner:
    """A thread that counts in Python, and so has the GIL whenever it can."""

    def __init__(self) -> None:
        self._count = 0
        self._ended = False
        self._rate = 0.0
        self._thread = threading.Thread(target=self._spin)

    def _spin(self) -> None:
        while not self._ended:
            self._count += 1

    def measure_rate(self, seconds: float) -> None:
        """Learn how quickly it counts when nobody takes the GIL from it."""
        started, before = time.perf_counter(), self._count
        # Until it has counted: on a busy machine a thread may not get to run for long.
        while self._count == before:
            time.sleep(seconds)
        self._rate = (self._count - before) / (time.perf_counter() - started)

    def without_gil_s(self, work: Callable[[], None]) -> float:
        """Return for how many seconds it did not have the GIL while ``work`` ran on the calling thread."""
        started, before = time.perf_counter(), self._count
        work()
        return time.perf_counter() - started - (self._count - before) / self._rate

    def __enter__(self) -> Spinner:
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ended = True
        self._thread.join()
        sys.setswitchinterval(self._interval)


def for_about(seconds: float, work: Callable[[], None], prepare: Callable[[], None]) -> tuple[int, float, float]:
    """Repeat work; return how often, and the wall and CPU seconds of it, without what prepares it."""
    count, wall_s, cpu_s = 0, 0.0, 0.0
    while wall_s < seconds:
        prepare()
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        wall_s += time.perf_counter() - wall
        cpu_s += time.process_time() - cpu
        count += 1
    return count, wall_s, cpu_s


def measure(system: System, blocks: np.ndarray, dtype: str, seconds: float) -> list[Row]:
    """Return a row for each way."""
    system.encode()
    system.prepare_decode()
    system.decode()
    verified = system.verify()
    found = []
    for op, work in (("encode", system.encode), ("decode", system.decode)):
        prepare = system.prepare_decode if op == "decode" else nothing
        count, wall_s, cpu_s = for_about(seconds, work, prepare)
        gb = count * blocks.nbytes / 1e9
        prepare()
        found.append({
            "bench": "codec", "system": system.name, "op": op, "dtype": dtype, "block_bytes": blocks.shape[1],
            "ratio": system.ratio, "gb_per_s": gb / wall_s, "cpu_s_per_gb": cpu_s / gb,
            "gil_free": gil_free(work, prepare, seconds, wall_s / count), "verified": verified,
        })  # fmt: skip
    return found


def gil_free(work: Callable[[], None], prepare: Callable[[], None], seconds: float, alone_s: float) -> float:
    """Return the share of the work's time in which it does not hold the GIL.

    Args:
        work: The work.
        prepare: What goes before each time; not measured.
        seconds: How long to measure.
        alone_s: Time that the work takes with nothing beside it.
    """
    held_s, times = 0.0, 0
    with Spinner() as spinner:
        spinner.measure_rate(seconds / 4)
        ended = time.perf_counter() + seconds
        while time.perf_counter() < ended:
            prepare()
            held_s += spinner.without_gil_s(work)
            times += 1
    return min(1.0, max(0.0, 1 - held_s / (times * alone_s)))


def nothing() -> None:
    """Prepare an encode."""


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--runs", type=int, metavar="N", help="runs that a row is the median of (5; quick: 1)")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="comma-separated element types")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="a real model to take the blocks from")
    options = parser.parse_args()
    runs = options.runs or (1 if options.quick else 5)
    seconds, tokens, layers = (0.05, 256, 4) if options.quick else (0.4, 2048, 4)
    finished: list[Row] = []
    with tempfile.TemporaryDirectory() as directory:
        keyring = Path(directory) / "keyring"
        keyring.write_text(new_document())
        try:
            for dtype in options.dtypes.split(","):
                finished += measure_dtype(
                    dtype, kv_of(dtype, tokens, layers, options.checkpoint), keyring, runs, seconds
                )
        except KeyboardInterrupt:
            print("Interrupted; this is what was finished.", file=sys.stderr)
    print_table(finished, COLUMNS)
    blocks_from = str(options.checkpoint) if options.checkpoint else f"bench/kv_tensors.py, {layers} layers"
    write_json(options.json, finished, blocks=blocks_from, blosc2=blosc2.__version__, zstandard=zstandard.__version__)


def kv_of(dtype: str, tokens: int, layers: int, checkpoint: Path | None) -> np.ndarray:
    """Return a batch of blocks, from the end of the prompt."""
    blocks = kv_blocks(dtype, tokens=tokens, layers=layers, checkpoint=checkpoint)
    return blocks[-max(1, BATCH_BYTES // blocks.shape[1]) :]


def measure_dtype(dtype: str, blocks: np.ndarray, keyring: Path, runs: int, seconds: float) -> list[Row]:
    """Measure all systems in turn, ``runs`` times; return the medians."""
    systems = make_systems(blocks, dtype, keyring)
    found: dict[tuple[str, str], list[Row]] = {}
    for _ in range(runs):
        for system in systems:
            for row in measure(system, blocks, dtype, seconds):
                found.setdefault((row["system"], row["op"]), []).append(row)
    return [median_row(of_one) for of_one in found.values()]


if __name__ == "__main__":
    main()
