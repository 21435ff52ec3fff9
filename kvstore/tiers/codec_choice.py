"""Codec choice: whether the blocks of a tier with ``"codec": "auto"`` are worth encoding, as measured at present.

Plain decisions from numbers that are handed in; no I/O, no threads, no clock but the one that is given.

To load a byte of a block takes ``1 / link`` seconds when it is stored raw. Encoded it takes the link ``ratio / link``
and the codec ``1 / decode``; of the shorter of the two a share passes while the other is at work, since batches are
decoded while the next are read. All four numbers are measured on what passes: link and decode rate as bytes by the time
in which at least one batch was on the link (being decoded), and the share from how long either was busy.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from kvstore.config import decode_config
from kvstore.runtime.messages import JobKind

__all__ = ["AutoOptions", "CodecChoice", "Rates", "encoding_pays"]

_GAIN_TO_BEGIN: Final = 0.06
_GAIN_TO_GO_ON: Final = 0.01
"""Least gains for which encoding begins, and ends if it is less. Measurements differ by some percent from second to
second, so the two are apart; and encoding takes processor time, so to be no loss is not enough."""
_DWELL_S: Final = 1.0
"""Least time between two changes, so that what one of them did to the numbers is measured before the next."""
_HALF_LIFE_S: Final = 5.0
"""Age at which a measurement counts half: old enough for hundreds of batches, young enough to follow a link."""
_SAMPLES_MIN: Final = 4
"""Batches that are encoded before anything is decided."""
_SAMPLE_EVERY: Final = 128
"""Raw batches between two that are encoded all the same, to know the ratio. Their blocks are loaded more slowly, which
at one in so many costs less than a percent."""
_KEEP: Final = 1 - 1 / 32
_KEEP_OF_SAMPLES: Final = 0.5
"""What each encoded batch leaves of the weight of those before it, while all are encoded and while few are."""
_BUSY_MIN_S: Final = 1e-12
"""Faded busy time below which nothing is known: a millisecond of use, two and a half minutes ago."""
_DECODE_BY_ENCODE: Final = 2.0
"""Decode rate by encode rate, assumed until a block was decoded; of byteplane and zstd it is two to three."""
_OVERLAP_UNKNOWN: Final = 0.5
"""Share of the shorter of link and decode time that is assumed to pass beside the other until it was measured."""


class AutoOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of ``"auto"``.

    Attributes:
        objective: ``"latency"`` encodes while it makes loads quicker; ``"bytes"`` while it makes records shorter.
    """

    objective: Literal["latency", "bytes"] = "latency"


@dataclass(frozen=True, slots=True)
class Rates:
    """What a decision is made from.

    Attributes:
        link: Stored bytes a second between medium and slots.
        decode: Plain bytes a second out of the decoder.
        ratio: Stored bytes by plain bytes of what was encoded.
        overlap: Share, 0 to 1, of the shorter of link and decode time that passes while the other is at work.
    """

    link: float
    decode: float
    ratio: float
    overlap: float

    @property
    def raw_s(self) -> float:
        """Seconds to load a plain byte that was stored as it is."""
        return 1 / self.link

    @property
    def encoded_s(self) -> float:
        """Seconds to load a plain byte that was encoded."""
        link, decode = self.ratio / self.link, 1 / self.decode
        return link + decode - self.overlap * min(link, decode)


def encoding_pays(rates: Rates, objective: str, *, now: bool) -> bool:
    """Decide whether to encode from here on.

    Args:
        rates: What was measured.
        objective: ``"latency"`` or ``"bytes"``.
        now: Whether blocks are being encoded at present: then a smaller gain is enough.
    """
    if objective == "bytes":
        encoded, raw = rates.ratio, 1.0
    else:
        encoded, raw = rates.encoded_s, rates.raw_s
    return encoded <= (1 - (_GAIN_TO_GO_ON if now else _GAIN_TO_BEGIN)) * raw


class CodecChoice:
    """Says before each batch whether to encode it, and is told what became of it. Threads may share it.

    Args:
        options: Options of ``"auto"``, see :class:`AutoOptions`.
        clock: Monotonic seconds.

    Raises:
        ConfigError: The options can't be used.
    """

    def __init__(self, options: Mapping[str, Any], clock: Callable[[], float] = time.monotonic) -> None:
        self._objective = decode_config(AutoOptions, options, where="codec 'auto'").objective
        self._clock = clock
        self._lock = threading.Lock()
        self._links = {kind: _Busy() for kind in JobKind}
        self._decodes = _Busy()
        self._loads = _Busy()
        """Time in which something was on the link or being decoded: with both alone it tells how they overlap."""
        self._decode_rate, self._overlap = 0.0, _OVERLAP_UNKNOWN
        self._encode_s, self._plain_bytes, self._encoded_bytes = 0.0, 0.0, 0.0
        self._samples = 0
        self._encodes = True
        self._changes = 0
        self._changed_at = float("-inf")
        self._raw_in_a_row = 0

    def encode_next(self) -> bool:
        """Return whether to encode the next batch that is stored."""
        with self._lock:
            if self._samples < _SAMPLES_MIN:
                return True
            self._judge()
            if self._encodes:
                return True
            self._raw_in_a_row += 1
            if self._raw_in_a_row <= _SAMPLE_EVERY:
                return False
            self._raw_in_a_row = 0
            return True

    def note_encoded(self, plain_bytes: int, stored_bytes: int, seconds: float) -> None:
        """Note a batch that the codecs were applied to: its length before and after, and how long that took."""
        with self._lock:
            # Forgotten by batches, not by time: while blocks are stored raw, the last samples are all that is known.
            keep = _KEEP if self._encodes else _KEEP_OF_SAMPLES
            self._plain_bytes = keep * self._plain_bytes + plain_bytes
            self._encoded_bytes = keep * self._encoded_bytes + stored_bytes
            self._encode_s = keep * self._encode_s + seconds
            self._samples += 1

    def link_started(self, kind: JobKind) -> None:
        """Note that a batch goes to the medium, or comes from it."""
        with self._lock:
            now = self._clock()
            self._links[kind].start(now)
            if kind is JobKind.LOAD:
                self._loads.start(now)

    def link_ended(self, kind: JobKind, stored_bytes: int) -> None:
        """Note that it is there, and how many bytes of payload it had; 0 if it failed."""
        with self._lock:
            now = self._clock()
            self._links[kind].end(now, stored_bytes)
            if kind is JobKind.LOAD:
                self._loads.end(now, 0)

    def decode_started(self) -> None:
        """Note that encoded blocks are about to be decoded."""
        with self._lock:
            now = self._clock()
            self._decodes.start(now)
            self._loads.start(now)

    def decode_ended(self, plain_bytes: int) -> None:
        """Note the end of that, and the bytes that came out."""
        with self._lock:
            now = self._clock()
            self._decodes.end(now, plain_bytes)
            self._loads.end(now, 0)

    def stats(self) -> dict[str, float]:
        """Return the choice and what it was made from, by name; rates in bytes a second, 0 while unknown."""
        with self._lock:
            rates = self._rates(self._clock())
            return {
                "encodes": float(self._encodes),
                "changes": float(self._changes),
                "link_bytes_per_s": rates.link if rates else 0.0,
                "decode_bytes_per_s": rates.decode if rates else 0.0,
                "ratio": rates.ratio if rates else 0.0,
                "overlap": rates.overlap if rates else 0.0,
            }

    def _rates(self, now: float) -> Rates | None:
        """Return what is measured by now; None while too little is known to decide."""
        store, load = (self._links[kind].rate(now) for kind in (JobKind.STORE, JobKind.LOAD))
        # Until something was loaded, stores tell how quick the link is.
        link = load or store
        if self._samples < _SAMPLES_MIN or not link or not self._plain_bytes:
            return None
        self._note_decoding(now)
        decode = self._decode_rate or _DECODE_BY_ENCODE * self._plain_bytes / max(self._encode_s, 1e-9)
        return Rates(link, decode, self._encoded_bytes / self._plain_bytes, self._overlap)

    def _note_decoding(self, now: float) -> None:
        """Learn decode rate and overlap, from blocks that are encoded as a rule.

        Samples are decoded one at a time, which says less of what all would take: of them only a higher rate counts.
        """
        rate = self._decodes.rate(now)
        if rate and (self._encodes or not self._decode_rate):
            link_s, decode_s = self._links[JobKind.LOAD].busy_s(now), self._decodes.busy_s(now)
            both_s = link_s + decode_s - self._loads.busy_s(now)
            self._decode_rate = rate
            self._overlap = min(1.0, max(0.0, both_s / min(link_s, decode_s))) if link_s else _OVERLAP_UNKNOWN
        else:
            self._decode_rate = max(rate, self._decode_rate)

    def _judge(self) -> None:
        now = self._clock()
        if now - self._changed_at < _DWELL_S:
            return
        rates = self._rates(now)
        if rates is None:
            return
        pays = encoding_pays(rates, self._objective, now=self._encodes)
        if pays != self._encodes:
            self._encodes = pays
            self._changes += 1
            self._changed_at = now
            self._raw_in_a_row = 0


class _Busy:
    """How long at least one of several overlapping things was going on, and the bytes they moved; the past fades."""

    def __init__(self) -> None:
        self._running = 0
        self._at = 0.0
        self._busy_s = 0.0
        self._bytes = 0.0

    def start(self, now: float) -> None:
        """Note a start."""
        self._pass_to(now)
        self._running += 1

    def end(self, now: float, size_bytes: int) -> None:
        """Note an end, and what was moved."""
        self._pass_to(now)
        self._running -= 1
        self._bytes += size_bytes

    def busy_s(self, now: float) -> float:
        """Return the time."""
        self._pass_to(now)
        return self._busy_s

    def rate(self, now: float) -> float:
        """Return bytes a second while busy; 0 if nothing was moved, or so long ago that it says nothing any more."""
        self._pass_to(now)
        return self._bytes / self._busy_s if self._busy_s > _BUSY_MIN_S else 0.0

    def _pass_to(self, now: float) -> None:
        passed = now - self._at
        self._at = now
        # Both fade alike, so an idle link keeps its rate; only what comes now weighs more.
        keep = 0.5 ** (passed / _HALF_LIFE_S)
        self._busy_s = keep * self._busy_s + (passed if self._running else 0.0)
        self._bytes *= keep
