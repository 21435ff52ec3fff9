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
from kvstore.codec.coding import Decoder
from kvstore.codec.record import RecordHeader
from kvstore.errors import ConfigError, RecordError
from kvstore.namespace import Namespace
from kvstore.registry import CODECS
from kvstore.runtime.messages import JobKind
from kvstore.secret import shown
from kvstore.tiers.codec_choice import CodecChoice

logger = logging.getLogger("kvstore.tiers")

_SHIPPED: Final = {1: "byteplane", 2: "byteplane", 3: "zstd"}
"""Names of the codecs that ship with kvstore, by wire id."""

_ELEMENT_BYTES: Final = {
    **dict.fromkeys(("bfloat16", "bf16", "float16", "fp16", "half"), 2),
    **dict.fromkeys(("float32", "fp32", "float"), 4),
}
"""Length of an element by the name of its type. Other types have one byte, or do not benefit from planes."""

_COUNTS: Final = (
    *("encoded_blocks", "raw_blocks", "encode_in_bytes", "encode_out_bytes", "encode_seconds"),
    *("decoded_blocks", "decode_in_bytes", "decode_out_bytes", "decode_seconds"),
)


class TierCodecs:
    """The codecs of one tier.

    Args:
        config: The tier's ``codec`` option.
        namespace: Namespace of its blocks.

    Raises:
        ConfigError: The option can't be used, or two of its codecs have the same wire id.
    """

    def __init__(self, config: ChainConfig, namespace: Namespace) -> None:
        self._context = CodecContext(namespace, element_bytes_of(namespace.document()["fields"]))
        self.chain: CodecChain = build_chain(config, self._context, CODECS.find)  # Codecs and seal for writing.
        self._refuse_shared_ids()
        self.decoder = Decoder(self._find, self.chain.seal)  # Reads records of any chain.
        # Decides whether to encode, for the chain ``"auto"``; None otherwise.
        self.choice = None if self.chain.auto is None else CodecChoice(self.chain.auto)
        self._codecs: dict[int, Codec | None] = {
            wire_id: codec for codec in self.chain.codecs for wire_id in codec.wire_ids
        }
        self._lock = threading.Lock()
        self._counts: defaultdict[str, float] = defaultdict(int)

    def encode_next(self) -> bool:
        """Return whether to apply the codecs to the next batch."""
        return bool(self.chain.codecs) and (self.choice is None or self.choice.encode_next())

    def note_encoded(
        self, payloads: Sequence[memoryview | None], slot_bytes: int, seconds: float, *, encoded: bool
    ) -> None:
        """Note a batch before its transfer to the medium, and whether the codecs were applied to it."""
        if self.chain.is_raw:
            return
        sizes = [payload.nbytes for payload in payloads if payload is not None]
        shortened = sum([size < slot_bytes for size in sizes])
        plain_bytes, stored_bytes = len(payloads) * slot_bytes, sum(sizes)
        self._count(
            encoded_blocks=shortened,
            raw_blocks=len(sizes) - shortened,
            encode_in_bytes=plain_bytes,
            encode_out_bytes=stored_bytes,
            encode_seconds=seconds,
        )
        if self.choice is not None and encoded:
            self.choice.note_encoded(plain_bytes, stored_bytes, seconds)

    def note_decoded(self, headers: Sequence[RecordHeader], seconds: float) -> None:
        """Count opened or decoded blocks."""
        self._count(
            decoded_blocks=len(headers),
            decode_in_bytes=sum(header.stored_bytes for header in headers),
            decode_out_bytes=sum(header.plain_bytes for header in headers),
            decode_seconds=seconds,
        )

    @contextmanager
    def on_link(self, kind: JobKind) -> Iterator[Callable[[int], None]]:
        """Time a call of the backend; pass the moved payload bytes, if any, to the yielded function."""
        moved = [0]
        if self.choice is not None:
            self.choice.link_started(kind)
        try:
            yield moved.append
        finally:
            if self.choice is not None:
                self.choice.link_ended(kind, moved[-1])

    def decode(
        self,
        headers: Sequence[RecordHeader],
        slots: Sequence[memoryview],
        rows: Sequence[memoryview],
        spares: Sequence[memoryview],
    ) -> tuple[list[RecordError | None], float]:
        """Decode blocks, see :meth:`Decoder.decode`; on a worker thread. Returns its result and its duration in s."""
        started = time.perf_counter()
        # Only encoded blocks: opening a seal is many times faster than decoding, and the choice does not affect it.
        decoded = [header.plain_bytes for header in headers if header.stored_bytes < header.plain_bytes]
        choice = self.choice if decoded else None
        if choice is not None:
            choice.decode_started()
        try:
            errors = self.decoder.decode(headers, slots, rows, spares)
        finally:
            if choice is not None:
                choice.decode_ended(sum(decoded))
        return errors, time.perf_counter() - started

    def stats(self) -> dict[str, float]:
        """Return the counts of ``TierStats.codec``; empty before the first encoded or decoded block."""
        counts = self._counts
        chosen = {} if self.choice is None else self.choice.stats()
        found = {f"auto_{name}": value for name, value in chosen.items()}
        if counts:
            stored = counts["encode_in_bytes"]
            ratio = counts["encode_out_bytes"] / stored if stored else 1.0
            found |= {**{name: counts[name] for name in _COUNTS}, "ratio": ratio}
        return found

    def _count(self, **more: float) -> None:
        for name, value in more.items():
            self._counts[name] += value

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
        """Create a codec outside the tier's chain, for records of another configuration; None if not available.

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
