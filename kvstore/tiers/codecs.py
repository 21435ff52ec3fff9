"""The codecs of a tier: its chain for writing, its decoder for reading, their counts, and the choice of ``"auto"``.

``"codec": "auto"`` decides by measurements whether blocks are encoded, from reported numbers and the given clock alone.
Loading a byte of a raw block takes ``1 / link`` seconds. For an encoded block, the link takes ``ratio / link`` and the
codec ``1 / decode``; half of the shorter time overlaps with the longer one, because batches are decoded while the next
are read. Encoding begins if it saves a fifth. Decoding takes processor time from a fast link, which is measurable only
afterwards, so for some seconds encoding is compared with the link rate from before.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal

import msgspec

from kvstore.codec.base import THIRD_PARTY_WIRE_ID_MIN, Codec, CodecContext, Step
from kvstore.codec.chain import AUTO, ChainConfig, CodecChain, build_chain, parse_chain
from kvstore.codec.coding import Decoder
from kvstore.codec.record import RecordHeader
from kvstore.config import decode_config
from kvstore.errors import ConfigError, RecordError
from kvstore.namespace import Namespace
from kvstore.registry import CODECS
from kvstore.runtime.messages import JobKind
from kvstore.secret import shown

_GAIN_TO_BEGIN: Final = 0.2
_GAIN_TO_GO_ON: Final = 0.1
"""Minimum savings to begin and to continue encoding. They differ because measurements vary by some percent from second
to second."""

_DWELL_S: Final = 1.0
"""Minimum time between two changes, so that the effect of one is measured before the next."""

_TRIAL_S: Final = 10.0
"""Time for which encoding is compared with the link rate from before."""

_PAUSE_S: Final = 30.0
"""Minimum time before encoding begins again. If encoding is not worthwhile, its trials take one or two seconds per
pause."""

_SAMPLES_MIN: Final = 4
"""Batches encoded before the first decision."""

_SAMPLE_EVERY: Final = 256
"""Batches stored raw per batch encoded as a sample, for ratio and decode rate."""

_KEEP: Final = 0.75
"""Factor on the weight of earlier batches per encoded batch. Batches count instead of time: while blocks are stored
raw, the last samples are the only data."""

_DECODE_BY_SAMPLE: Final = 2.0
"""Ratio of the decode rate of many batches to that of single ones, because two threads decode. Also the assumed ratio
of decode to encode rate before the first decoded batch."""

_OVERLAP: Final = 0.5
"""Share of the shorter of link and decode time that overlaps with the longer one."""

_HALF_LIFE_S: Final = 5.0
"""Half-life of a measurement's weight."""

_FORGOTTEN: Final = 0.98
"""Fraction of its weight that a measurement loses at a change, because loads differ afterwards."""


class AutoOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of ``"auto"``."""

    objective: Literal["latency", "bytes"] = "latency"
    """``"latency"`` encodes while that makes loads faster; ``"bytes"`` while it makes records shorter."""


class CodecChoice:
    """Decides before each batch whether to encode it, from reports of earlier ones. Threads may share it.

    ``options``: options of ``"auto"``, see :class:`AutoOptions`.
    """

    def __init__(self, options: Mapping[str, Any], clock: Callable[[], float] = time.monotonic) -> None:
        self._objective = decode_config(AutoOptions, options, where="codec 'auto'").objective
        self._clock = clock
        self._lock = threading.Lock()
        self._links = {kind: _Busy() for kind in JobKind}
        self._decodes = _Busy()
        self._encode_s, self._plain_bytes, self._encoded_bytes = 0.0, 0.0, 0.0
        self._samples = 0
        # Encoding probably makes records shorter; an effect on loads must be measured first.
        self._encodes = self._objective == "bytes"
        self._changes = 0
        self._changed_at = float("-inf")
        self._may_begin_at = float("-inf")
        self._link_before = 0.0
        self._raw_batches = 0

    def encode_next(self) -> bool:
        """Return whether to encode the next batch of a store."""
        with self._lock:
            self._judge()
            self._raw_batches += 1
            if self._encodes or self._samples < _SAMPLES_MIN or self._raw_batches > _SAMPLE_EVERY:
                self._raw_batches = 0
                return True
            return False

    def note_encoded(self, plain_bytes: int, stored_bytes: int, seconds: float) -> None:
        """Note an encoded batch: its lengths before and after in bytes, and the time in seconds."""
        with self._lock:
            self._plain_bytes = _KEEP * self._plain_bytes + plain_bytes
            self._encoded_bytes = _KEEP * self._encoded_bytes + stored_bytes
            self._encode_s = _KEEP * self._encode_s + seconds
            self._samples += 1

    def link_started(self, kind: JobKind) -> None:
        """Note the start of a batch's transfer to or from the medium."""
        with self._lock:
            self._links[kind].start(self._clock())

    def link_ended(self, kind: JobKind, stored_bytes: int) -> None:
        """Note the end of a transfer, with its payload bytes; 0 if it failed."""
        with self._lock:
            self._links[kind].end(self._clock(), stored_bytes)

    def decode_started(self) -> None:
        """Note the start of decoding."""
        with self._lock:
            self._decodes.start(self._clock())

    def decode_ended(self, plain_bytes: int) -> None:
        """Note the end of decoding, with the decoded bytes."""
        with self._lock:
            self._decodes.end(self._clock(), plain_bytes)

    def stats(self) -> dict[str, float]:
        """Return the choice and its measurements, by name; rates in bytes per second, 0 while unknown."""
        with self._lock:
            now = self._clock()
            return {
                "encodes": float(self._encodes),
                "changes": float(self._changes),
                "link_bytes_per_s": self._link(now),
                "decode_bytes_per_s": self._decode(now),
                "ratio": self._ratio(),
            }

    def _judge(self) -> None:
        now = self._clock()
        link = self._link(now)
        if now - self._changed_at < _DWELL_S or self._samples < _SAMPLES_MIN or not link:
            return
        raw = self._link_before if self._encodes and now - self._changed_at < _TRIAL_S else 0.0
        raw = raw or link
        gain = 1 - self._ratio() if self._objective == "bytes" else 1 - self._encoded_s(now, link) * raw
        if self._encodes and gain < _GAIN_TO_GO_ON:
            self._may_begin_at = now + _PAUSE_S
        elif self._encodes or gain < _GAIN_TO_BEGIN or now < self._may_begin_at:
            return
        self._encodes = not self._encodes
        self._link_before = self._links[JobKind.LOAD].rate(now)
        self._changes += 1
        self._changed_at = now
        for busy in (*self._links.values(), self._decodes):
            busy.forget()

    def _encoded_s(self, now: float, link: float) -> float:
        """Return the seconds to load an encoded plain byte."""
        link_s, decode_s = self._ratio() / link, 1 / self._decode(now)
        return link_s + decode_s - _OVERLAP * min(link_s, decode_s)

    def _link(self, now: float) -> float:
        """Return the link's rate: that of loads, or of stores before the first load."""
        store, load = (self._links[kind].rate(now) for kind in (JobKind.STORE, JobKind.LOAD))
        return load or store

    def _decode(self, now: float) -> float:
        rate = self._decodes.rate(now)
        if rate and self._encodes:
            return rate
        return _DECODE_BY_SAMPLE * (rate or self._plain_bytes / max(self._encode_s, 1e-9))

    def _ratio(self) -> float:
        return self._encoded_bytes / self._plain_bytes if self._plain_bytes else 1.0


class _Busy:
    """Busy time of overlapping transfers (at least one was running) and their bytes, with fading weights."""

    def __init__(self) -> None:
        self._running = 0
        self._at = 0.0
        self._busy_s = 0.0
        self._bytes = 0.0

    def start(self, now: float) -> None:
        """Note the start of a transfer."""
        self._pass_to(now)
        self._running += 1

    def end(self, now: float, size_bytes: int) -> None:
        """Note the end of a transfer, with the moved bytes."""
        self._pass_to(now)
        self._running -= 1
        self._bytes += size_bytes

    def forget(self) -> None:
        """Reduce the weight of the past; running transfers continue."""
        self._busy_s, self._bytes = (1 - _FORGOTTEN) * self._busy_s, (1 - _FORGOTTEN) * self._bytes

    def rate(self, now: float) -> float:
        """Return bytes per busy second; 0 without a recent transfer."""
        self._pass_to(now)
        return self._bytes / self._busy_s if self._busy_s > 1e-6 else 0.0

    def _pass_to(self, now: float) -> None:
        passed = now - self._at
        self._at = now
        # Both fade equally, so an idle link keeps its rate; new transfers only weigh more.
        keep = 0.5 ** (passed / _HALF_LIFE_S)
        self._busy_s = keep * self._busy_s + (passed if self._running else 0.0)
        self._bytes *= keep


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
    """The codecs of one tier. ``config``: the tier's ``codec`` option."""

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

    ``fields``: ``kv_dtype`` and ``dtype``, directly or within ``engine_config`` and ``model``.
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
