"""Codecs and seals on KV blocks: compression ratio, and rate of encoding and decoding.

    python bench/codec.py [--quick] [--runs N] [--dtypes bf16,fp8] [--checkpoint DIR] [--json FILE]

The measured work is that of a tier on a batch of 4 MiB, on one of its two worker threads, memory to memory: ``encode``
comprises codecs, seal, checksum and header; ``decode`` comprises all checks, opening the seal and decoding. ``raw`` is
therefore the checksum alone. For comparison there are ``zstandard`` (only the package's own calls, one per block) and
``blosc2`` (shuffle and bitshuffle with zstd, one thread). Every decoded block is compared with the original.

``gb_per_s`` is plain bytes per wall time of one thread; ``cpu_s_per_gb`` counts all threads of the process.

The blocks come from bench/kv_tensors.py, which describes their statistics.
"""

from __future__ import annotations

import mmap
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.common import Row, arguments, in_turns, median_row, needs, reporting, runs_of

needs("blosc2", "cryptography", "torch", "transformers", "zstandard")

import blosc2
import numpy as np
import zstandard

from bench.kv_tensors import DTYPES, kv_blocks
from kvstore import Namespace
from kvstore.codec.coding import Encoder
from kvstore.codec.keyring import new_document
from kvstore.codec.record import HEADER_BYTES, RecordCodec
from kvstore.tiers.codecs import TierCodecs

COLUMNS = ["dtype", "system", "op", "ratio", "gb_per_s", "cpu_s_per_gb", "verified", "runs"]
LEVELS = (-5, 1, 3)
BATCH_BYTES = 4 << 20
NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "float8_e4m3fn"}

Buffers = list[memoryview]


class System(ABC):
    """A system that encodes and decodes the blocks of a batch.

    Attributes:
        name: Its name in rows.
        ratio: Stored bytes divided by plain bytes, of the last encode.
    """

    name: str
    ratio = 1.0

    @abstractmethod
    def encode(self) -> None:
        """Encode all blocks."""

    @abstractmethod
    def prepare_decode(self) -> None:
        """Place the encoded data where a load would place it; not measured."""

    @abstractmethod
    def decode(self) -> None:
        """Decode all blocks."""

    @abstractmethod
    def verify(self) -> bool:
        """Return whether the last decode restored the blocks."""


class Kvstore(System):
    """A tier's own encoder and decoder, with all steps for a batch."""

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
        payloads, _ = self._encoder.encode(
            self._keys, self._headers, self._blocks, self._targets, self._spares, encode=bool(self._codecs.chain.codecs)
        )
        self._payloads = [payload for payload in payloads if payload is not None]
        self.ratio = sum(payload.nbytes for payload in self._payloads) / self._plain.nbytes

    def prepare_decode(self) -> None:
        for slot, payload in zip(self._slots, self._payloads, strict=True):
            slot[: payload.nbytes] = payload

    def decode(self) -> None:
        refusal = self._codecs.decoder.refusal
        headers, slots = [], []
        for key, header, slot, payload in zip(self._keys, self._headers, self._slots, self._payloads, strict=True):
            found = self._records.check(key, header, slot, HEADER_BYTES + payload.nbytes, refusal)
            if found.codec_chain:
                headers.append(found)
                slots.append(slot)
        if headers:
            self._codecs.decoder.decode(headers, slots, self._lower[: len(slots)], self._upper[: len(slots)])

    def verify(self) -> bool:
        return all(slot == block.data for slot, block in zip(self._slots, self._plain, strict=True))


class Calls(System):
    """A package's own calls for encoding and decoding, block by block."""

    def __init__(
        self, name: str, encode: Callable[[Any], bytes], decode: Callable[[bytes], Any], blocks: np.ndarray
    ) -> None:
        self.name = name
        self._encode, self._decode = encode, decode
        self._plain = list(blocks)
        self._encoded: list[bytes] = []
        self._decoded: list[Any] = []

    def encode(self) -> None:
        self._encoded = [self._encode(block) for block in self._plain]
        self.ratio = sum(map(len, self._encoded)) / sum(block.nbytes for block in self._plain)

    def prepare_decode(self) -> None:
        """Nothing to do."""

    def decode(self) -> None:
        self._decoded = [self._decode(data) for data in self._encoded]

    def verify(self) -> bool:
        return all(bytes(one) == two.tobytes() for one, two in zip(self._decoded, self._plain, strict=True))


def rows(count: int, size: int) -> Buffers:
    """Return consecutive rows of page-aligned memory, like a tier's slots."""
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


def for_about(seconds: float, work: Callable[[], None], prepare: Callable[[], None]) -> tuple[int, float, float]:
    """Repeat ``work``; return the number of repetitions and their wall and CPU seconds, without ``prepare``."""
    count, wall_s, cpu_s = 0, 0.0, 0.0
    while wall_s < seconds:
        prepare()
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        wall_s += time.perf_counter() - wall
        cpu_s += time.process_time() - cpu
        count += 1
    return count, wall_s, cpu_s


def measure(system: System, op: str, blocks: np.ndarray, dtype: str, seconds: float) -> Row:
    """Measure encoding or decoding; return its row."""
    system.encode()
    system.prepare_decode()
    system.decode()
    verified = system.verify()
    work, prepare = (system.encode, lambda: None) if op == "encode" else (system.decode, system.prepare_decode)
    count, wall_s, cpu_s = for_about(seconds, work, prepare)
    gb = count * blocks.nbytes / 1e9
    return {
        "bench": "codec", "system": system.name, "op": op, "dtype": dtype, "block_bytes": blocks.shape[1],
        "ratio": system.ratio, "gb_per_s": gb / wall_s, "cpu_s_per_gb": cpu_s / gb, "verified": verified,
    }  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="comma-separated element types")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="a real model to take the blocks from")
    options = parser.parse_args()
    seconds, tokens, layers = (0.05, 256, 4) if options.quick else (0.4, 2048, 4)
    source = str(options.checkpoint) if options.checkpoint else f"bench/kv_tensors.py, {layers} layers"
    versions = {"blosc2": blosc2.__version__, "zstandard": zstandard.__version__}
    with (
        reporting(options, COLUMNS, blocks=source, **versions) as finished,
        tempfile.TemporaryDirectory() as directory,
    ):
        keyring = Path(directory) / "keyring"
        keyring.write_text(new_document())
        for dtype in options.dtypes.split(","):
            blocks = kv_blocks(dtype, tokens=tokens, layers=layers, checkpoint=options.checkpoint)
            # One batch, from the end of the prompt.
            blocks = blocks[-max(1, BATCH_BYTES // blocks.shape[1]) :]
            turns = {
                f"{system.name} {op}": partial(measure, system, op, blocks, dtype, seconds)
                for system in make_systems(blocks, dtype, keyring)
                for op in ("encode", "decode")
            }
            finished += [median_row(of_one) for of_one in in_turns(runs_of(options, 5), turns).values()]


if __name__ == "__main__":
    main()
