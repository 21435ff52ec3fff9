"""Codec choice: decides by measurements whether a tier with ``"codec": "auto"`` encodes blocks.

Pure decisions from reported numbers: no I/O, no threads, only the given clock.

Loading a byte of a raw block takes ``1 / link`` seconds. For an encoded block, the link takes ``ratio / link`` and the
codec ``1 / decode``; half of the shorter time overlaps with the longer one, because batches are decoded while the next
are read. Encoding begins if it saves a fifth. Decoding takes processor time from a fast link, which is measurable only
afterwards, so for some seconds encoding is compared with the link rate from before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import msgspec

from kvstore.config import decode_config
from kvstore.runtime.messages import JobKind

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
        return _DECODE_BY_SAMPLE * (rate or self._plain_bytes / max(self._encode_s, 1e-9)) or 1.0

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
