"""Codec trials: what encoding does to a link, known only by trying, and the bound of what is tried.

For :mod:`kvstore.tiers.codec_choice`. Plain numbers; no clock but the moments that are handed in.
"""

from __future__ import annotations

from typing import Final

__all__ = ["Busy", "Delay", "Trials", "encoded_share"]

_TRIAL_S: Final = 10.0
"""Encoding that ends sooner was a trial that failed."""
_RAW_BY_TRIAL: Final = 200
_RAW_BY_TRIAL_MAX: Final = 3200
"""Bytes stored raw after a trial that failed, by its own, and twice as many after each further one over the same link:
with the samples, less than two in a hundred are explored."""
_LINK_CHANGE: Final = 4 / 3
"""A link that is so many times quicker or slower than at a trial that failed is another one, and tried at once."""
_FRESH_HALF_LIFE_S: Final = 0.5
"""The same for the link just before and after a change; of busy time, as hours may pass between two loads."""
_DELAY_S_MAX: Final = 2e-9
"""Most that is believed of a delay, in seconds a byte. What processors and records cost is less; over a slow link,
where a little noise is more than that, a delay that was measured within a second may not speak against encoding."""
_FRESH_MIN_S: Final = 0.02
"""Least busy time from which a fresh rate is believed."""
_MOSTLY: Final = 0.7
"""Share of what is loaded that makes it a load of encoded (or raw) blocks: those from before a change come later."""
_HALF_LIFE_S: Final = 5.0
"""Age at which a measurement counts half: old enough for hundreds of batches, young enough to follow a link."""
_BUSY_MIN_S: Final = 1e-12
"""Faded busy time below which nothing is known: a millisecond of use, two and a half minutes ago."""


class Trials:
    """What was encoded to find out, and until when nothing is tried."""

    def __init__(self) -> None:
        self._all_bytes = 0
        self._explored_bytes = 0
        self._phase_bytes = 0
        self._link = 0.0
        self._failed_link = 0.0
        """Link at the last trial that failed; 0 if nothing is barred."""
        self._bar_bytes = 0
        self._raw_by_trial = _RAW_BY_TRIAL

    @property
    def explored(self) -> float:
        """Share of all bytes that were encoded as samples, or in trials that failed."""
        return self._explored_bytes / max(1, self._all_bytes)

    def note_encoded(self, size_bytes: int) -> None:
        """Note a batch that is encoded as a rule."""
        self._all_bytes += size_bytes
        self._phase_bytes += size_bytes

    def note_raw(self, size_bytes: int) -> None:
        """Note a batch that is stored raw."""
        self._all_bytes += size_bytes
        self._bar_bytes -= size_bytes

    def note_sample(self, size_bytes: int) -> None:
        """Note one that is encoded as an exception."""
        self._all_bytes += size_bytes
        self._explored_bytes += size_bytes

    def begin(self, link: float) -> None:
        """Note that encoding begins, over a link of this rate."""
        self._link, self._phase_bytes, self._failed_link = link, 0, 0.0

    def end(self, link: float, seconds: float) -> None:
        """Note that it ends after so long, over a link of this rate."""
        if seconds < _TRIAL_S:
            self._explored_bytes += self._phase_bytes
        # Over another link than it began with it was no mistake, and says nothing of what comes.
        if seconds < _TRIAL_S and _alike(link, self._link):
            self._failed_link, self._bar_bytes = link, self._raw_by_trial * self._phase_bytes
            self._raw_by_trial = min(2 * self._raw_by_trial, _RAW_BY_TRIAL_MAX)
        else:
            self._raw_by_trial = _RAW_BY_TRIAL

    def bars(self, link: float) -> bool:
        """Whether nothing is to be tried over a link of this rate."""
        return bool(self._failed_link) and self._bar_bytes > 0 and _alike(link, self._failed_link)

    def expire(self) -> bool:
        """Forget a trial that failed when its time is over; return whether it was."""
        if not self._failed_link or self._bar_bytes > 0:
            return False
        self._failed_link = 0.0
        return True


class Delay:
    """How much longer a byte takes on the link while blocks are encoded: learnt from each change to that.

    Attributes:
        seconds: Seconds more for each stored byte.
        link: Loads on the link.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.link = Busy(_FRESH_HALF_LIFE_S, idle_fades=False)
        self._decoded_bytes = 0.0
        self._decoded_at_s = 0.0
        """Busy time of the link when that number was right; it fades as the link's own numbers do."""
        self._raw_s = 0.0
        """Seconds for a byte of raw blocks when encoding began; 0 if that is not known, or was used."""

    def link_if_raw(self, link: float, encoded_share: float) -> float:
        """Return the rate that a link would have for raw blocks, from the one at which some are encoded."""
        return 1 / max(1 / link - encoded_share * self.seconds, 0.5 / link)

    def note_decoded(self, now: float, plain_bytes: int) -> None:
        """Note what was decoded of what was loaded."""
        at_s = self.link.total_s(now)
        self._decoded_bytes *= 0.5 ** ((at_s - self._decoded_at_s) / _FRESH_HALF_LIFE_S)
        self._decoded_bytes += plain_bytes
        self._decoded_at_s = at_s

    def knows_raw(self, now: float, ratio: float) -> bool:
        """Whether raw blocks were loaded just now, so that encoded ones can be compared with them."""
        return self.link.busy_s(now) >= _FRESH_MIN_S and self._encoded_share(now, ratio) <= 1 - _MOSTLY

    def note_begin(self, now: float, ratio: float, link: float) -> None:
        """Note that encoding begins, over a link that has had this rate for a while."""
        rate = self.link.rate(now)
        # Of a link that is changing now it could not be said what changed it.
        steady = rate and _alike(rate, link) and self.knows_raw(now, ratio)
        self._raw_s = 1 / rate if steady else 0.0
        self.link.forget()
        self._decoded_bytes = 0.0

    def learn(self, now: float, ratio: float) -> None:
        """Compare the link with what it was before, once what is loaded is mostly encoded."""
        rate = self.link.rate(now)
        if (
            self._raw_s
            and rate
            and self.link.busy_s(now) >= _FRESH_MIN_S
            and self._encoded_share(now, ratio) >= _MOSTLY
        ):
            self.seconds = min(max(0.0, 1 / rate - self._raw_s), self._raw_s, _DELAY_S_MAX)
            self._raw_s = 0.0

    def _encoded_share(self, now: float, ratio: float) -> float:
        self.note_decoded(now, 0)
        return encoded_share(self.link.moved_bytes(now), self._decoded_bytes, ratio)


def encoded_share(link_bytes: float, decoded_bytes: float, ratio: float) -> float:
    """Return how much of what was loaded was encoded, 0 to 1."""
    return min(1.0, ratio * decoded_bytes / max(1.0, link_bytes))


def _alike(one: float, two: float) -> bool:
    return 1 / _LINK_CHANGE < one / two < _LINK_CHANGE


class Busy:
    """How long at least one of several overlapping things was going on, and the bytes they moved; the past fades."""

    def __init__(self, half_life_s: float = _HALF_LIFE_S, *, idle_fades: bool = True) -> None:
        self._half_life_s = half_life_s
        self._idle_fades = idle_fades
        self._total_s = 0.0
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

    def total_s(self, now: float) -> float:
        """Return all the time since the start, not faded."""
        self._pass_to(now)
        return self._total_s

    def moved_bytes(self, now: float) -> float:
        """Return the bytes."""
        self._pass_to(now)
        return self._bytes

    def forget(self, share: float = 1.0) -> None:
        """Take that much of its weight from the past; what is going on goes on."""
        self._busy_s, self._bytes = (1 - share) * self._busy_s, (1 - share) * self._bytes

    def rate(self, now: float) -> float:
        """Return bytes a second while busy; 0 if nothing was moved, or so long ago that it says nothing any more."""
        self._pass_to(now)
        return self._bytes / self._busy_s if self._busy_s > _BUSY_MIN_S else 0.0

    def _pass_to(self, now: float) -> None:
        passed = now - self._at
        self._at = now
        busy_s = passed if self._running else 0.0
        self._total_s += busy_s
        # Both fade alike, so an idle link keeps its rate; only what comes now weighs more.
        keep = 0.5 ** ((passed if self._idle_fades else busy_s) / self._half_life_s)
        self._busy_s = keep * self._busy_s + busy_s
        self._bytes *= keep
