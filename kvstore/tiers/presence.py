"""Knowledge of the medium's blocks, to avoid queries: presence, open questions, failed and refused loads.

:class:`Presence`, :class:`Existence` and :class:`FailedLoads` belong to the scheduler half of a tier,
:class:`RefusedRecords` to the I/O half. All are bounded, do no I/O and take the time as an argument or from a clock.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import Final, NamedTuple

from kvstore.bounded import BoundedDict
from kvstore.runtime.messages import AskExistence
from kvstore.types import BlockKey, Found, RequestContext, Source

_ABSENT_MAX: Final = 1 << 18
"""Negative answers remembered; with more distinct misses within the TTL, queries are repeated."""

_SHARED_MAX: Final = 1 << 20
"""Blocks of a shared tier remembered as present (about 256 MB). The medium may hold more, and is queried again for
forgotten ones. For an authoritative medium all are kept: its capacity is the bound."""

_UNREAD_S: Final = 60.0
"""Time for which an answer waits for the lookup that caused its question: longer than any step."""

_UNREAD_MAX: Final = 1 << 16
"""Answers that wait for their lookups; as many as keys in open questions."""

_QUESTION_KEYS_MAX: Final = 4096
"""Keys per question; a request of 500,000 tokens has about as many blocks."""

_ADDRESSES_MAX: Final = 64
"""Engines that the requests of one step may name; requests that name further ones wait for the next step."""

_QUESTION_SOURCES_MAX: Final = 256
"""Hand-overs of one engine per question; as many as concurrent requests of an engine."""

_ASK_AGAIN_S: Final = 0.02
"""Pause between queries for a block that another engine is computing: a step of a large model takes this long."""

_SOURCE_ANSWERS_MAX: Final = 1 << 16
"""Answers about sources remembered; forgotten ones are queried again."""

_SETTLED_MAX: Final = 256
"""Sources remembered per block; at least as many as a question has."""

_PENDING_MAX: Final = 1 << 16
"""Keys in open questions; beyond it lookups answer MISS, which is always allowed."""

_FAILED_KEYS_MAX: Final = 1 << 16
"""Failed keys remembered; forgetting one costs one more failed load."""

_FAILED_REQUESTS_MAX: Final = 1 << 12
"""Requests with failed loads remembered; more than an engine runs concurrently."""

_REFUSED_MAX: Final = 1 << 16
"""Refused records remembered (about 10 MB); forgetting one costs one more refused load."""

_REPLACED_MAX: Final = 4096
"""Records remembered as replaced, while loads of their predecessors may still be running."""

_REFUSED_PAUSE_S: Final = 10.0
"""Time for which a refused record stays hidden. Its key may enter the keyring within a second, and another engine may
store the block again at any moment."""

_REFUSED_PAUSE_S_MAX: Final = 300.0
"""Limit of the pause, which doubles with each refusal. At the limit, a record costs one load every five minutes, and a
record that became readable is found within that time."""


class Presence:
    """The keys that a tier holds, from reports of its I/O half.

    For an authoritative medium the set is complete once recovery has ended. For others it is a cache: answers
    hold for their TTL, and the medium is queried for all other keys. Recovered keys are absorbed one message at a time
    (:meth:`absorb`), because a million at once would delay a step.

    Args:
        positive_ttl_s: Time for which a block of a shared tier counts as present.
        negative_ttl_s: Time for which an absence is remembered.
        shared_max: Maximum blocks of a shared tier to remember.
        on_forgotten: Called with blocks of a shared tier that are forgotten for lack of room.
    """

    def __init__(
        self,
        *,
        authoritative: bool,
        positive_ttl_s: float,
        negative_ttl_s: float,
        shared_max: int = _SHARED_MAX,
        on_forgotten: Callable[[Sequence[BlockKey]], object] = len,
    ) -> None:
        self._on_forgotten = on_forgotten
        self._authoritative = authoritative
        self._held_max = shared_max
        self._positive_ttl_s = positive_ttl_s
        self._negative_ttl_s = negative_ttl_s
        self._held: set[BlockKey] = set()
        self._held_until: dict[BlockKey, float] = {}
        self._absent_until: BoundedDict[BlockKey, float] = BoundedDict(_ABSENT_MAX)
        self._unread: BoundedDict[BlockKey, tuple[float, bool]] = BoundedDict(_UNREAD_MAX)
        """Times and contents of answers that no lookup has read yet."""
        self._recovered: deque[tuple[Sequence[BlockKey], bool]] = deque()
        self._gone_since_start: set[BlockKey] = set()
        """Blocks removed, or reported as absent, before the end of recovery."""
        self._scan_ended = False
        self.complete = False  # Whether recovery has ended.

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._held

    def keys(self) -> list[BlockKey]:
        return list(self._held)

    def holds(self, key: BlockKey, now: float, since: float = 0.0) -> bool | None:
        """Return whether the tier holds a key at ``now`` (monotonic seconds); None if the medium must be queried.

        Absences from before ``since`` don't count.
        """
        if key in self._held:
            return True if self._authoritative or now < self._held_until.get(key, 0.0) else None
        if self.complete and self._authoritative:
            return False
        until = self._absent_until.get(key)
        is_absent = until is not None and now < until and until - self._negative_ttl_s >= since
        return False if is_absent else None

    def unknown_among(self, keys: Sequence[BlockKey], now: float) -> list[int]:
        """Return the positions of keys that are not known to be present."""
        held = self._held
        if self._authoritative:
            return [i for i, key in enumerate(keys) if key not in held]
        return [i for i, key in enumerate(keys) if not self.holds(key, now)]

    def add(self, keys: Sequence[BlockKey], now: float) -> None:
        """Note present blocks."""
        self._held.update(keys)
        self._forget_answers(keys)
        if self._absent_until:
            for key in keys:
                self._absent_until.pop(key, None)
        if not self._authoritative:
            until = now + self._positive_ttl_s
            for key in keys:
                self._held_until.pop(key, None)  # Keeps the dict in the order of the answers.
                self._held_until[key] = until
            while len(self._held_until) > self._held_max:
                oldest = next(iter(self._held_until))
                del self._held_until[oldest]
                self._held.discard(oldest)
                self._on_forgotten((oldest,))

    def remove(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Note removed blocks; return those that were present."""
        self._forget_answers(keys)
        gone = [key for key in keys if key in self._held]
        self._held.difference_update(gone)
        for key in gone:
            self._held_until.pop(key, None)
        if not self.complete:
            self._gone_since_start.update(keys)
        return gone

    def note_absent(self, keys: Sequence[BlockKey], now: float) -> list[BlockKey]:
        """Note the medium's answer that it lacks blocks; return those that were present until now."""
        gone = self.remove(keys)
        until = now + self._negative_ttl_s
        for key in keys:
            self._absent_until[key] = until
        return gone

    def await_reading(self, keys: Sequence[BlockKey], found: bool, now: float) -> None:
        """Keep an answer until the next lookup of each key, if the TTL may end before that lookup."""
        if (self._positive_ttl_s if found else self._negative_ttl_s) < _UNREAD_S:
            for key in keys:
                self._unread[key] = now, found

    def take_answer(self, key: BlockKey, now: float, since: float) -> bool | None:
        """Return whether the tier holds a key, by an answer that no lookup has read; None if there is none.

        Absences from before ``since`` don't count.
        """
        answer = self._unread.pop(key, None) if self._unread else None
        if answer is None:
            return None
        at, found = answer
        return found if now - at < _UNREAD_S and (found or at >= since) else None

    def _forget_answers(self, keys: Sequence[BlockKey]) -> None:
        if self._unread:
            for key in keys:
                self._unread.pop(key, None)

    def recover(self, keys: Sequence[BlockKey], *, own: bool = True) -> None:
        """Queue keys found by the scan at start, and whether this engine reports them."""
        self._recovered.append((keys, own))

    def end_recovery(self, *, authoritative: bool) -> None:
        """Note the end of the scan; presence is complete when all of its keys are absorbed.

        If the scan was not ``authoritative``, the medium is queried as for a shared tier.
        """
        self._scan_ended = True
        self._authoritative = self._authoritative and authoritative

    def absorb(self, now: float) -> tuple[Sequence[BlockKey], bool]:
        """Add one message of recovered keys; return its blocks, and whether this engine reports them."""
        absorbed: Sequence[BlockKey] = ()
        own = False
        if self._recovered:
            found, own = self._recovered.popleft()
            # A block evicted after the scan listed it must not reappear.
            absorbed = [key for key in found if key not in self._gone_since_start] if self._gone_since_start else found
            self.add(absorbed, now)
        if self._scan_ended and not self._recovered:
            self.complete = True
            self._gone_since_start.clear()
        return absorbed, own


class _Answer(NamedTuple):
    """The last answer of the sources at one address about a block missing there."""

    ask_again_at: float
    found: int
    """A ``Found``: ABSENT, COMING, or UNKNOWN if the sources failed to answer."""
    settled: frozenset[Source]
    """Sources with a final answer: they knew the blocks of their hand-over, or failed."""
    failed_until: float
    """End of the pause after an incomplete answer, without the source or another part of the medium; 0 if complete."""


class Existence:
    """Open questions to the medium about unknown keys: single-flighted, batched, with a deadline.

    Requests that name a source have questions of their own, one per address, so that a source delays only them. The
    caller sends the questions and passes on the answers.
    """

    def __init__(
        self,
        timeout_s: float,
        error_pause_s: float,
        *,
        pending_max: int = _PENDING_MAX,
        addresses_max: int = _ADDRESSES_MAX,
        sources_max: int = _QUESTION_SOURCES_MAX,
    ) -> None:
        self._pending_max, self._addresses_max, self._sources_max = pending_max, addresses_max, sources_max
        self._timeout_s = timeout_s
        self._error_pause_s = error_pause_s
        self._pending: dict[tuple[str, BlockKey], float] = {}
        """Deadline of each open question, by address of the source (empty without one) and key."""
        self.unasked: dict[str, list[BlockKey]] = {}  # Keys of the next questions, by address.
        self._sources: dict[str, dict[Source, None]] = {}
        self._questions: dict[int, AskExistence] = {}
        self._source_answers: BoundedDict[tuple[str, BlockKey], _Answer] = BoundedDict(_SOURCE_ANSWERS_MAX)
        """The last answer about each block queried at sources and missing there."""
        self._quiet_until = 0.0
        self._last_id = 0

    def ask(self, key: BlockKey, now: float, source: Source | None = None) -> bool:
        """Add a key to the next question unless one is open, together with its request's source.

        Returns:
            Whether the caller should wait for the answer.
        """
        place = _address(source), key
        deadline = self._pending.get(place)
        if deadline is None:
            if place in self._source_answers and now < self._source_answers[place].ask_again_at:
                return True  # It was queried a moment ago.
            # After an error, the answer is unknown, and a question in every step would burden a failing medium.
            if now < self._quiet_until or len(self._pending) >= self._pending_max:
                return False
            if not self._admits_source(source):
                return True  # It is queried in the next step.
            deadline = self._pending[place] = now + self._timeout_s
            self.unasked.setdefault(place[0], []).append(key)
        elif place[0] in self.unasked:
            # Another request queries it in this step, perhaps for another hand-over.
            self._admits_source(source)
        return now < deadline

    def pauses(self, now: float) -> bool:
        """Return whether the medium is not queried, because its last answer was an error."""
        return now < self._quiet_until

    def _admits_source(self, source: Source | None) -> bool:
        """Add a source to the next questions; False if they have too many."""
        if source is None:
            return True
        if source.address not in self._sources and len(self._sources) >= self._addresses_max:
            return False
        sources = self._sources.setdefault(source.address, {})
        if source not in sources and len(sources) >= self._sources_max:
            return False
        sources[source] = None
        return True

    def is_open(self, key: BlockKey, now: float, ctx: RequestContext | None) -> bool:
        """Return whether the source of a request may soon have a block that it lacked."""
        if ctx is None or ctx.source is None or now >= ctx.since + ctx.patience_s:
            return False
        answer = self._source_answers.get((ctx.source.address, key))
        if answer is None or ctx.source not in answer.settled:
            return True
        return answer.found == Found.COMING or (answer.found == Found.ABSENT and now < ctx.since + ctx.unheard_s)

    def has_failed(self, key: BlockKey, now: float, source: Source | None) -> bool:
        """Return whether the last answer to requests with this source was incomplete, a moment ago."""
        answer = self._source_answers.get((_address(source), key))
        return answer is not None and now < answer.failed_until

    def take_questions(self, now: float) -> list[AskExistence]:
        questions = []
        for address, unasked in self.unasked.items():
            sources = tuple(self._sources.get(address, ()))
            for start in range(0, len(unasked), _QUESTION_KEYS_MAX):
                keys = tuple(unasked[start : start + _QUESTION_KEYS_MAX])
                self._last_id += 1
                question = AskExistence(self._last_id, keys, now + self._timeout_s, sources)
                self._questions[self._last_id] = question
                questions.append(question)
        self.unasked.clear()
        self._sources.clear()
        return questions

    def answered(
        self, question_id: int, found: bytes, now: float, sources: bytes = b""
    ) -> tuple[list[BlockKey], list[BlockKey], list[BlockKey]]:
        """Note an answer: one byte per key and one per source, or none if the question failed.

        Returns:
            The keys of present and absent blocks, and of those unknown to requests without a source. Announced blocks
            count as absent, for requests that do not wait for them.
        """
        question = self._questions.pop(question_id, None)
        if question is None:
            return [], [], []
        answers = list(zip(question.keys, found or repeat(Found.UNKNOWN), strict=False))
        address = _address(next(iter(question.sources), None))
        for key, _ in answers:
            self._pending.pop((address, key), None)
        if question.sources:
            states = dict(zip(question.sources, sources or repeat(Found.UNKNOWN), strict=False))
            self._note_sources(address, answers, states, now)
        if not found:
            self._quiet_until = now + self._error_pause_s
            return [], [], []
        present = [key for key, answer in answers if answer == Found.THERE]
        absent = [key for key, answer in answers if answer in (Found.ABSENT, Found.COMING)]
        unknown = [key for key, answer in answers if answer == Found.UNKNOWN and not address]
        return present, absent, unknown

    def _note_sources(
        self, address: str, answers: Sequence[tuple[BlockKey, int]], states: Mapping[Source, int], now: float
    ) -> None:
        """Note the answers of an address; a source in the state COMING does not know its hand-over's blocks yet."""
        # Requests do not wait for a failed source.
        failed = Found.UNKNOWN in states.values()
        known = frozenset(source for source, state in states.items() if state != Found.COMING)
        for key, answer in answers:
            before = self._source_answers.pop((address, key), None)
            if answer == Found.THERE:
                continue
            settled, others = known, frozenset() if before is None else before.settled - states.keys()
            if len(settled) + len(others) <= _SETTLED_MAX:
                settled |= others
            found = Found.UNKNOWN if failed else Found.COMING if answer == Found.COMING else Found.ABSENT
            failed_until = now + self._error_pause_s if answer == Found.UNKNOWN else 0.0
            again_at = now if failed else now + _ASK_AGAIN_S
            self._source_answers[address, key] = _Answer(again_at, found, settled, failed_until)


class FailedLoads:
    """Keys whose last load failed: MISS for that request until it ends, for all others during a pause.

    Without it a request would repeat the same failing load endlessly.
    """

    def __init__(self, retry_after_s: float) -> None:
        self._retry_after_s = retry_after_s
        self._until: BoundedDict[BlockKey, float] = BoundedDict(_FAILED_KEYS_MAX)
        # Bounded, because a load that fails after its request has ended is never forgotten by forget_request().
        self._by_request: BoundedDict[str, set[BlockKey]] = BoundedDict(_FAILED_REQUESTS_MAX)

    def note(self, keys: Sequence[BlockKey], ctx: RequestContext | None, now: float) -> None:
        """Note a failed load of keys on behalf of a request."""
        for key in keys:
            self._until[key] = now + self._retry_after_s
        if ctx is not None:
            self._by_request.setdefault(ctx.request_id, set()).update(keys)

    def blocks(self, key: BlockKey, ctx: RequestContext | None, now: float) -> bool:
        """Return whether a lookup of the key by the request must answer MISS."""
        if not self._until and not self._by_request:
            return False
        if ctx is not None and key in self._by_request.get(ctx.request_id, ()):
            return True
        until = self._until.get(key)
        if until is None:
            return False
        if now < until:
            return True
        del self._until[key]
        return False

    def forget_request(self, request_id: str) -> None:
        self._by_request.pop(request_id, None)


class RefusedRecords:
    """Records on the medium that can't be read here: hidden for a pause, remembered until read or replaced.

    Such a record seems intact, but its key is not in the keyring, its codec is not installed, or it lacks a seal.
    Another engine may be able to read it, so it stays on the medium. Here it counts as absent; otherwise it would be
    found, promoted and refused repeatedly. Belongs to one event loop.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: BoundedDict[BlockKey, tuple[float, float]] = BoundedDict(_REFUSED_MAX)
        """End and length of each pause, in the order of the last refusals."""
        self._replaced: BoundedDict[BlockKey, float] = BoundedDict(_REPLACED_MAX)
        """Time at which each refused record was replaced, in that order."""

    def __len__(self) -> int:
        return len(self._known)

    def note(self, keys: Sequence[BlockKey], seconds: float = 0.0) -> None:
        """Note records refused just now, by a load that took ``seconds``.

        Records replaced during that load are skipped, because the load read their predecessors.
        """
        now = self._clock()
        for key in keys:
            if self._replaced.get(key, now - seconds) > now - seconds:
                continue
            _, last_s = self._known.pop(key, (0.0, 0.0))
            pause_s = min(2 * last_s, _REFUSED_PAUSE_S_MAX) or _REFUSED_PAUSE_S
            self._known[key] = (now + pause_s, pause_s)

    def forget(self, keys: Sequence[BlockKey], *, replaced: bool = False) -> None:
        """Forget records that were read, replaced or removed."""
        for key in keys if self._known else ():
            if self._known.pop(key, None) is not None and replaced:
                self._replaced[key] = self._clock()

    def among(self, keys: Sequence[BlockKey]) -> set[BlockKey]:
        """Return the keys whose last load was refused, regardless of its age."""
        return {key for key in keys if key in self._known} if self._known else set()

    def lasting(self, keys: Sequence[BlockKey]) -> set[BlockKey]:
        """Return the keys that were refused again after a pause."""
        return {key for key in self.among(keys) if self._known[key][1] > _REFUSED_PAUSE_S}

    def hidden_among(self, keys: Sequence[BlockKey]) -> set[BlockKey]:
        """Return the keys that count as absent at present."""
        now = self._clock()
        return {key for key in self.among(keys) if now < self._known[key][0]}


def _address(source: Source | None) -> str:
    return source.address if source is not None else ""
