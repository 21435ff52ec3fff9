"""Codec choice: whether the blocks of a tier with ``"codec": "auto"`` are worth encoding, as measured at present.

Plain decisions from numbers that are handed in; no I/O, no threads, no clock but the one that is given.

To load a byte of a block takes ``1 / link`` seconds when it is stored raw. Encoded it takes the link ``ratio / link``
and the codec ``1 / decode``, of the shorter of which half passes beside the other, as batches are decoded while the
next are read. Encoding begins where that saves a fifth. Decoding takes processor time from a quick link, which is seen
only afterwards: for some seconds encoding is compared with the link as it was before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import msgspec

from kvstore.config import decode_config
from kvstore.runtime.messages import JobKind

__all__ = ["AutoOptions", "CodecChoice"]

_GAIN_TO_BEGIN: Final = 0.2
_GAIN_TO_GO_ON: Final = 0.1
"""Shares that encoding has to save. The two are apart, as measurements differ by some percent from second to second."""

_DWELL_S: Final = 1.0
"""Least time between two changes, so that what one of them did is measured before the next."""

_TRIAL_S: Final = 10.0
"""Time for which encoded blocks are compared with the link before."""

_RETRY_S: Final = 10.0
_RETRY_S_MAX: Final = 1280.0
"""Pause before encoding begins again, twice as long after each end, unless the link has changed."""

_LINK_CHANGE: Final = 4 / 3
"""A link that is so many times quicker or slower than when encoding ended is another one."""

_SAMPLES_MIN: Final = 4
"""Batches that are encoded before anything is decided."""

_SAMPLE_EVERY: Final = 256
"""Batches stored raw for each that is encoded all the same, to know ratio and decode rate."""

_KEEP: Final = 1 - 1 / 32
_KEEP_OF_SAMPLES: Final = 0.5
"""What each encoded batch leaves of the weight of those before it, while all are encoded and while few are."""

_DECODE_BY_SAMPLE: Final = 2.0
"""Decode rate of many batches by that of single ones: there are two threads for it. Of a codec that has not decoded
anything yet, decode rate by encode rate."""

_OVERLAP: Final = 0.5
"""Share of the shorter of link and decode time that passes beside the longer one."""

_HALF_LIFE_S: Final = 5.0
"""Time in which what was measured loses half of its weight."""

_FORGOTTEN: Final = 0.98
"""Share of its weight that a measurement loses at a change: from there on loads will be others."""


class AutoOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of ``"auto"``.

    Attributes:
        objective: ``"latency"`` encodes while it makes loads quicker; ``"bytes"`` while it makes records shorter.
    """

    objective: Literal["latency", "bytes"] = "latency"


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
        self._encode_s, self._plain_bytes, self._encoded_bytes = 0.0, 0.0, 0.0
        self._samples = 0
        # Of encoding it is only known that it makes records shorter; whether loads get quicker has to be seen.
        self._encodes = self._objective == "bytes"
        self._changes = 0
        self._changed_at = float("-inf")
        self._retry_at, self._retry_s = float("-inf"), _RETRY_S
        self._link_before, self._link_at_end = 0.0, 0.0
        self._raw_batches = 0

    def encode_next(self) -> bool:
        """Return whether to encode the next batch that is stored."""
        with self._lock:
            self._judge()
            self._raw_batches += 1
            if self._encodes or self._samples < _SAMPLES_MIN or self._raw_batches > _SAMPLE_EVERY:
                self._raw_batches = 0
                return True
            return False

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
            self._links[kind].start(self._clock())

    def link_ended(self, kind: JobKind, stored_bytes: int) -> None:
        """Note that it is there, and how many bytes of payload it had; 0 if it failed."""
        with self._lock:
            self._links[kind].end(self._clock(), stored_bytes)

    def decode_started(self) -> None:
        """Note that encoded blocks are about to be decoded."""
        with self._lock:
            self._decodes.start(self._clock())

    def decode_ended(self, plain_bytes: int) -> None:
        """Note the end of that, and the bytes that came out."""
        with self._lock:
            self._decodes.end(self._clock(), plain_bytes)

    def stats(self) -> dict[str, float]:
        """Return the choice and what it was made from, by name; rates in bytes a second, 0 while unknown."""
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
            self._retry_at, self._link_at_end = now + self._retry_s, raw
            self._retry_s = min(2 * self._retry_s, _RETRY_S_MAX)
        elif self._encodes or gain < _GAIN_TO_BEGIN or not self._may_begin(now, link):
            return
        self._encodes = not self._encodes
        self._link_before = self._links[JobKind.LOAD].rate(now)
        self._changes += 1
        self._changed_at = now
        for busy in (*self._links.values(), self._decodes):
            busy.forget()

    def _may_begin(self, now: float, link: float) -> bool:
        if not 1 / _LINK_CHANGE < link / (self._link_at_end or link) < _LINK_CHANGE:
            self._retry_s = _RETRY_S
            return True
        return now >= self._retry_at

    def _encoded_s(self, now: float, link: float) -> float:
        """Return the seconds to load a plain byte that was encoded."""
        link_s, decode_s = self._ratio() / link, 1 / self._decode(now)
        return link_s + decode_s - _OVERLAP * min(link_s, decode_s)

    def _link(self, now: float) -> float:
        """Return the link's rate; until something was loaded, stores tell it."""
        store, load = (self._links[kind].rate(now) for kind in (JobKind.STORE, JobKind.LOAD))
        return load or store

    def _decode(self, now: float) -> float:
        rate = self._decodes.rate(now)
        if rate and self._encodes:
            return rate
        return _DECODE_BY_SAMPLE * (rate or self._plain_bytes / max(self._encode_s, 1e-9)) or 1.0

    def _ratio(self) -> float:
        return self._encoded_bytes / self._plain_bytes if self._plain_bytes else 1.0


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

    def forget(self) -> None:
        """Take most of its weight from the past; what is going on goes on."""
        self._busy_s, self._bytes = (1 - _FORGOTTEN) * self._busy_s, (1 - _FORGOTTEN) * self._bytes

    def rate(self, now: float) -> float:
        """Return bytes a second while busy; 0 if nothing was moved, or so long ago that it says nothing any more."""
        self._pass_to(now)
        return self._bytes / self._busy_s if self._busy_s > 1e-6 else 0.0

    def _pass_to(self, now: float) -> None:
        passed = now - self._at
        self._at = now
        # Both fade alike, so an idle link keeps its rate; only what comes now weighs more.
        keep = 0.5 ** (passed / _HALF_LIFE_S)
        self._busy_s = keep * self._busy_s + (passed if self._running else 0.0)
        self._bytes *= keep
