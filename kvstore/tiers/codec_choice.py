"""Codec choice: whether the blocks of a tier with ``"codec": "auto"`` are worth encoding, as measured at present.

Plain decisions from numbers that are handed in; no I/O, no threads, no clock but the one that is given.

To load a byte of a block takes ``1 / link`` seconds when it is stored raw. Encoded it takes the link ``ratio / link``
and the codec ``1 / decode``; of the shorter of the two a share passes while the other is at work, since batches are
decoded while the next are read. All four numbers are measured on what passes: link and decode rate as bytes by the time
in which at least one batch was on the link (being decoded), and the share from how long either was busy.

A quick link is slower for encoded blocks than for raw ones: decoding takes processor time from it, and what is paid for
each record counts more where records are short. That delay, in seconds a byte, is the difference between the link
before encoding began and after; it can only be known by trying. So what is tried has a bound: samples are one byte in
128 or fewer, and after a trial that failed two hundred times its bytes are stored raw before the next one, unless the
link has changed.
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
from kvstore.tiers.codec_trials import Busy, Delay, Trials, encoded_share

__all__ = ["AutoOptions", "CodecChoice", "Rates", "encoding_pays"]

_GAIN_TO_BEGIN: Final = 0.04
_GAIN_TO_GO_ON: Final = 0.01
"""Least gains for which encoding begins, and ends if it is less. Measurements differ by some percent from second to
second, so the two are apart; and encoding takes processor time, so to be no loss is not enough."""
_FORGOTTEN: Final = 0.98
"""Share of its weight that a measurement loses at a change."""
_DWELL_S: Final = 1.0
"""Least time between two changes, so that what one of them did to the numbers is measured before the next."""
_GAIN_BY_STORES: Final = 0.15
"""Least gain for which encoding begins while nothing was loaded yet: stores say less of what loads will take."""
_RAW_AWAITED_S: Final = 30.0
"""Time that loads of raw blocks are waited for, with which those of encoded ones can be compared. On a medium that is
full of encoded ones there may be none for long."""
_SAMPLES_MIN: Final = 4
"""Batches that are encoded before anything is decided."""
_SAMPLE_EVERY: Final = 128
_SAMPLE_EVERY_MAX: Final = 8192
"""Bytes stored raw for each that is encoded all the same, to know the ratio."""
_SAMPLE_COST_MAX: Final = 0.005
"""Share by which such blocks may make loads slower; where they take far longer than raw ones, there are fewer."""
_KEEP: Final = 1 - 1 / 32
_KEEP_OF_SAMPLES: Final = 0.5
"""What each encoded batch leaves of the weight of those before it, while all are encoded and while few are."""
_DECODE_BY_ENCODE: Final = 2.0
"""Decode rate by encode rate, assumed until a block was decoded; of byteplane and zstd it is two to three."""
_DECODE_BY_SAMPLE: Final = 2.0
"""Decode rate of many batches by that of single ones, assumed until many were decoded: there are two threads for it."""
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
        link: Stored bytes a second between medium and slots, of blocks that are stored raw.
        decode: Plain bytes a second out of the decoder.
        ratio: Stored bytes by plain bytes of what was encoded.
        overlap: Share, 0 to 1, of the shorter of link and decode time that passes while the other is at work.
        delay: Seconds more that a stored byte takes on the link if blocks are encoded.
    """

    link: float
    decode: float
    ratio: float
    overlap: float
    delay: float = 0.0

    @property
    def raw_s(self) -> float:
        """Seconds to load a plain byte that was stored as it is."""
        return 1 / self.link

    @property
    def encoded_s(self) -> float:
        """Seconds to load a plain byte that was encoded."""
        link, decode = self.ratio * (1 / self.link + self.delay), 1 / self.decode
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
        self._links = {kind: Busy() for kind in JobKind}
        self._decodes = Busy()
        self._loads = Busy()
        """Time in which something was on the link or being decoded: with both alone it tells how they overlap."""
        self._decode_rate, self._overlap = 0.0, _OVERLAP_UNKNOWN
        self._decode_known = False
        self._encode_s, self._plain_bytes, self._encoded_bytes = 0.0, 0.0, 0.0
        self._samples = 0
        # Of encoding it is only known that it makes records shorter; whether loads get quicker has to be seen.
        self._encodes = self._objective == "bytes"
        self._changes = 0
        self._changed_at = float("-inf")
        self._began_at = clock()
        self._samples_asked = 0
        self._raw_bytes = 0
        """Bytes stored raw since the last sample."""
        self._sample_every = float(_SAMPLE_EVERY)
        self._trials = Trials()
        self._delay = Delay()

    def encode_next(self, size_bytes: int) -> bool:
        """Return whether to encode the next batch that is stored, which has so many bytes."""
        with self._lock:
            self._judge()
            if self._encodes:
                self._trials.note_encoded(size_bytes)
                return True
            self._raw_bytes += size_bytes
            if self._samples_asked < _SAMPLES_MIN:
                self._samples_asked += 1
            elif self._raw_bytes < self._sample_every * size_bytes:
                self._trials.note_raw(size_bytes)
                return False
            self._raw_bytes = 0
            self._trials.note_sample(size_bytes)
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
                self._delay.link.start(now)

    def link_ended(self, kind: JobKind, stored_bytes: int) -> None:
        """Note that it is there, and how many bytes of payload it had; 0 if it failed."""
        with self._lock:
            now = self._clock()
            self._links[kind].end(now, stored_bytes)
            if kind is JobKind.LOAD:
                self._loads.end(now, 0)
                self._delay.link.end(now, stored_bytes)

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
            self._delay.note_decoded(now, plain_bytes)

    def stats(self) -> dict[str, float]:
        """Return the choice and what it was made from, by name; rates in bytes a second, 0 while unknown."""
        with self._lock:
            rates = self._rates(self._clock())
            return {
                "encodes": float(self._encodes),
                "changes": float(self._changes),
                "link_bytes_per_s": self._link(self._clock()) if rates else 0.0,
                "decode_bytes_per_s": rates.decode if rates else 0.0,
                "ratio": rates.ratio if rates else 0.0,
                "overlap": rates.overlap if rates else 0.0,
                "delay_s_per_gb": rates.delay * 1e9 if rates else 0.0,
                "explored": self._trials.explored,
            }

    def _rates(self, now: float) -> Rates | None:
        """Return what is measured by now; None while too little is known to decide."""
        link = self._link(now)
        if self._samples < _SAMPLES_MIN or not link or not self._plain_bytes:
            return None
        self._note_decoding(now)
        decode = self._decode_rate or _DECODE_BY_ENCODE * self._plain_bytes / max(self._encode_s, 1e-9)
        if not self._decode_known:
            decode *= _DECODE_BY_SAMPLE
        ratio = self._encoded_bytes / self._plain_bytes
        loaded, decoded = self._links[JobKind.LOAD].moved_bytes(now), self._decodes.moved_bytes(now)
        share = encoded_share(loaded, decoded, ratio)
        link = self._delay.link_if_raw(link, share)
        return Rates(link, decode, ratio, self._overlap, self._delay.seconds)

    def _link(self, now: float) -> float:
        """Return the link's rate as measured; until something was loaded, stores tell it."""
        store, load = (self._links[kind].rate(now) for kind in (JobKind.STORE, JobKind.LOAD))
        return load or store

    def _note_decoding(self, now: float) -> None:
        """Learn decode rate and overlap, from blocks that are encoded as a rule.

        Samples are decoded one at a time, which says less of what all would take: of them only a higher rate counts.
        """
        rate = self._decodes.rate(now)
        if rate and (self._encodes or not self._decode_rate):
            self._decode_known = self._encodes
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
        if self._encodes and self._plain_bytes:
            self._delay.learn(now, self._encoded_bytes / self._plain_bytes)
        if not self._encodes and self._trials.expire():
            self._delay.seconds = 0.0  # What one trial measured is no reason never to try again.
        rates = self._rates(now)
        if rates is None:
            return
        more = max(0.0, rates.encoded_s / rates.raw_s - 1) if self._objective == "latency" else 0.0
        self._sample_every = min(max(_SAMPLE_EVERY, more / _SAMPLE_COST_MAX), _SAMPLE_EVERY_MAX)
        pays = encoding_pays(rates, self._objective, now=self._encodes)
        if pays != self._encodes and (self._objective == "bytes" or not pays or self._may_try(rates, now)):
            self._encodes = pays
            self._changes += 1
            if pays:
                self._trials.begin(rates.link)
                self._delay.note_begin(now, rates.ratio, rates.link)
            else:
                self._trials.end(rates.link, now - self._changed_at)
            self._changed_at = now
            self._raw_bytes = 0
            # From here on loads will be others; what was measured before stands until they are.
            for busy in (*self._links.values(), self._decodes, self._loads):
                busy.forget(_FORGOTTEN)

    def _may_try(self, rates: Rates, now: float) -> bool:
        """Whether what promises to pay is to be begun."""
        if self._trials.bars(rates.link):
            return False
        if not self._links[JobKind.LOAD].rate(now):
            return rates.encoded_s <= (1 - _GAIN_BY_STORES) * rates.raw_s
        return self._delay.knows_raw(now, rates.ratio) or now - self._began_at > _RAW_AWAITED_S
