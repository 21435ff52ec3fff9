"""The codecs of a tier: its chain for writing, its decoder for reading, and their counts."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from kvstore.codec.base import THIRD_PARTY_WIRE_ID_MIN, Codec, CodecContext, Step
from kvstore.codec.chain import AUTO, ChainConfig, CodecChain, build_chain, parse_chain
from kvstore.codec.decoder import Decoder, StoredBlock
from kvstore.codec.encoder import EncodedBatch
from kvstore.errors import ConfigError, RecordError
from kvstore.namespace import Namespace
from kvstore.registry import CODECS
from kvstore.runtime.messages import JobKind
from kvstore.secret import shown
from kvstore.tiers.codec_choice import CodecChoice

__all__ = ["CodecCounts", "TierCodecs", "element_bytes_of", "namespace_with_codecs"]

logger = logging.getLogger("kvstore.tiers")

_SHIPPED: Final = {1: "byteplane", 2: "byteplane", 3: "zstd"}
"""Names of the codecs that ship with kvstore, by wire id."""

_ELEMENT_BYTES: Final = {
    **dict.fromkeys(("bfloat16", "bf16", "float16", "fp16", "half"), 2),
    **dict.fromkeys(("float32", "fp32", "float"), 4),
}
"""Length of an element by the name of its type. Other types have one byte, or do not benefit from planes."""


class TierCodecs:
    """The codecs of one tier.

    Args:
        config: The tier's ``codec`` option.
        namespace: Namespace of its blocks.

    Raises:
        ConfigError: The option can't be used, or two of its codecs have the same wire id.

    Attributes:
        chain: Codecs and seal for writing.
        decoder: Reads records of any chain.
        counts: Counts of both.
        choice: Decides whether to encode, for the chain ``"auto"``; None otherwise.
    """

    def __init__(self, config: ChainConfig, namespace: Namespace) -> None:
        self._context = CodecContext(namespace, element_bytes_of(namespace.document()["fields"]))
        self.chain: CodecChain = build_chain(config, self._context, CODECS.find)
        self._refuse_shared_ids()
        self.decoder = Decoder(self._find, self.chain.seal)
        self.counts = CodecCounts()
        self.choice = None if self.chain.auto is None else CodecChoice(self.chain.auto)
        self._codecs: dict[int, Codec | None] = {
            wire_id: codec for codec in self.chain.codecs for wire_id in codec.wire_ids
        }
        self._lock = threading.Lock()

    def encode_next(self) -> bool:
        """Return whether to apply the codecs to the next batch."""
        return bool(self.chain.codecs) and (self.choice is None or self.choice.encode_next())

    def note_encoded(self, batch: EncodedBatch, plain_bytes: int, *, encoded: bool) -> None:
        """Note a batch on its way to the medium, and whether the codecs were applied to it."""
        if self.chain.is_raw:
            return
        self.counts.note_encoded(batch, plain_bytes)
        if self.choice is not None and encoded:
            self.choice.note_encoded(plain_bytes, batch.stored_bytes, batch.seconds)

    @contextmanager
    def on_link(self, kind: JobKind) -> Iterator[Callable[[int], None]]:
        """Time a call of the backend; pass the moved payload bytes, if any, to the yielded function."""
        moved = [0]
        if self.choice is not None:
            self.choice.link_started(kind)
        try:
            yield lambda stored_bytes: moved.append(stored_bytes)
        finally:
            if self.choice is not None:
                self.choice.link_ended(kind, moved[-1])

    def decode(
        self, blocks: Sequence[StoredBlock], rows: Sequence[memoryview], spares: Sequence[memoryview]
    ) -> tuple[list[RecordError | None], float]:
        """Decode blocks, see :meth:`Decoder.decode`; on a worker thread. Returns its result and the seconds it took."""
        started = time.perf_counter()
        # Only encoded blocks: opening a seal is many times faster than decoding, and the choice does not affect it.
        decoded = [block.header.plain_bytes for block in blocks if block.header.stored_bytes < block.header.plain_bytes]
        choice = self.choice if decoded else None
        if choice is not None:
            choice.decode_started()
        try:
            errors = self.decoder.decode(blocks, rows, spares)
        finally:
            if choice is not None:
                choice.decode_ended(sum(decoded))
        return errors, time.perf_counter() - started

    def stats(self) -> dict[str, float]:
        """Return the counts of ``TierStats.codec``."""
        chosen = {} if self.choice is None else self.choice.stats()
        return {**self.counts.snapshot(), **{f"auto_{name}": value for name, value in chosen.items()}}

    def _find(self, wire_id: int) -> Codec | None:
        if wire_id not in self._codecs:
            with self._lock:
                if wire_id not in self._codecs:
                    self._codecs[wire_id] = self._make(wire_id)
        return self._codecs[wire_id]

    def _refuse_shared_ids(self) -> None:
        by_id: defaultdict[int, set[type[Step]]] = defaultdict(set)
        for step in [*self.chain.codecs, *([self.chain.seal] if self.chain.seal else [])]:
            for wire_id in step.wire_ids:
                by_id[wire_id].add(type(step))
        for wire_id, classes in by_id.items():
            if len(classes) > 1:
                raise ConfigError(
                    f"Codecs {' and '.join(sorted(map(repr, map(_path, classes))))} have the same wire id {wire_id}, "
                    "by which records name them. Give one of them another id, or leave it out."
                )

    def _make(self, wire_id: int) -> Codec | None:
        """Make a codec outside the tier's chain, for records of another configuration; None if it is not available.

        Only for codecs that ship with kvstore. Blocks of any other codec have their own namespace (see
        :func:`namespace_with_codecs`), and every tier of that namespace has the codec in its chain.
        """
        name = _SHIPPED.get(wire_id)
        if name is None:
            return None
        try:
            cls: type[Codec] = CODECS.find(name)
            return cls(cls.options_type(), self._context)
        except ConfigError as error:
            logger.warning("Codec %r, which may be needed to read older blocks, can't be used: %s", name, error)
            return None


def namespace_with_codecs(namespace: Namespace, config: ChainConfig) -> Namespace:
    """Return the namespace of blocks written with a ``codec`` option: it includes the classes of third-party steps.

    There is no registry of the wire ids from ``THIRD_PARTY_WIRE_ID_MIN`` on. Two engines may have different codecs
    with the same id, and could not distinguish each other's blocks.

    Raises:
        ConfigError: The option can't be used.
    """
    steps = [CODECS.find(spec.name) for spec in parse_chain(config) if spec.name != AUTO]
    try:
        classes = {
            str(wire_id): _path(step)
            for step in steps
            for wire_id in step.wire_ids
            if wire_id >= THIRD_PARTY_WIRE_ID_MIN
        }
    except (TypeError, AttributeError) as error:
        raise ConfigError(f"A codec of {shown(config)} has no wire ids: {error}. Give it 'wire_ids'.") from error
    return namespace.with_fields(codecs=classes) if classes else namespace


class CodecCounts:
    """Counts of a tier's codecs since it was opened; belongs to the loop thread."""

    def __init__(self) -> None:
        self._stored_blocks = 0
        self._encoded_blocks = 0
        self._encode_in_bytes = 0
        self._encode_out_bytes = 0
        self._encode_s = 0.0
        self._decoded_blocks = 0
        self._decode_in_bytes = 0
        self._decode_out_bytes = 0
        self._decode_s = 0.0

    def note_encoded(self, batch: EncodedBatch, plain_bytes: int) -> None:
        """Count a batch of stored blocks, encoded or raw."""
        self._stored_blocks += sum(payload is not None for payload in batch.payloads)
        self._encoded_blocks += batch.encoded_blocks
        self._encode_in_bytes += plain_bytes
        self._encode_out_bytes += batch.stored_bytes
        self._encode_s += batch.seconds

    def note_decoded(self, blocks: int, stored_bytes: int, plain_bytes: int, seconds: float) -> None:
        """Count opened or decoded blocks."""
        self._decoded_blocks += blocks
        self._decode_in_bytes += stored_bytes
        self._decode_out_bytes += plain_bytes
        self._decode_s += seconds

    def snapshot(self) -> dict[str, float]:
        """Return all counts by name, as in ``TierStats.codec``; empty before the first encoded or decoded block."""
        if not self._stored_blocks and not self._decoded_blocks:
            return {}
        return {
            "encoded_blocks": self._encoded_blocks,
            "raw_blocks": self._stored_blocks - self._encoded_blocks,
            "encode_in_bytes": self._encode_in_bytes,
            "encode_out_bytes": self._encode_out_bytes,
            "encode_seconds": self._encode_s,
            "decoded_blocks": self._decoded_blocks,
            "decode_in_bytes": self._decode_in_bytes,
            "decode_out_bytes": self._decode_out_bytes,
            "decode_seconds": self._decode_s,
            "ratio": self._encode_out_bytes / self._encode_in_bytes if self._encode_in_bytes else 1.0,
        }


def _path(cls: type[Step]) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def element_bytes_of(fields: Mapping[str, Any]) -> int:
    """Return the length of a KV cache's elements in bytes, from a namespace's fields; 1 if they don't contain it.

    Args:
        fields: ``kv_dtype`` and ``dtype``, directly or within ``engine_config`` and ``model``.
    """
    engine, model = (fields.get(name) for name in ("engine_config", "model"))
    for value in (
        engine.get("kv_dtype") if isinstance(engine, Mapping) else None,
        fields.get("kv_dtype"),
        model.get("dtype") if isinstance(model, Mapping) else None,
        fields.get("dtype"),
    ):
        # "auto" is the model's own type, given by one of the next fields.
        if isinstance(value, str) and value not in ("", "auto"):
            return _ELEMENT_BYTES.get(value.lower().removeprefix("torch."), 1)
    return 1
