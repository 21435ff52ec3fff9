"""The peer backend: loads blocks from the memory of other engines, and serves our own to them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import ClassVar, Final

from kvstore.backends.base import BackendStats, PeerMedium, RecordGeometry, RecordRead, RecordWrite
from kvstore.backends.peer.client import Peer, PeerError, PeerLog
from kvstore.backends.peer.config import NOTHING_TO_SERVE, PeerConfig, endpoint_of
from kvstore.backends.peer.directory import Directory
from kvstore.backends.peer.limits import LIMITS, Limits
from kvstore.backends.peer.server import PeerServer, serving_tls
from kvstore.backends.stream import TLS, Endpoint, check_tls, client_tls
from kvstore.bounded import BoundedDict
from kvstore.config import TierConfig
from kvstore.errors import BackendClosedError, ConfigError
from kvstore.namespace import Namespace
from kvstore.primary.lending import Lender
from kvstore.runtime.limits import CallsUnderWay, RetryBudget
from kvstore.types import BlockInfo, BlockKey, Found, Locality, Medium, Outcome, Source

logger = logging.getLogger("kvstore.backends.peer")

_PLACES_MAX: Final = 262144
"""Blocks whose peer is remembered (some 40 MB); for all other blocks, all peers are queried again."""

_SENT_MAX: Final = 65536
"""Loaded blocks whose sender is remembered until they are verified: more than a tier loads at once."""

_CANDIDATES_MAX: Final = 2
"""Peers that the directory names for one lookup: the best one, and another for the blocks missing there."""

_TRIALS_MAX: Final = 32
_TRIALS_AT_ONCE: Final = 8
"""Maximum background trials of the directory's peers, in total and begun by one lookup: enough to find an engine among
hundreds of false entries soon, with few descriptors."""

_STRANGERS_MAX: Final = 4.0
_STRANGERS_SHARE: Final = 0.01
"""Budget of failed queries of directory peers that have never answered: an initial allowance, then one in a hundred
lookups. Without budget, such peers are only tried in the background, so that false entries delay no request."""

_COUNTED: Final = (
    *("connections_opened", "connections_failed", "answers_late", "peers_distrusted", "named_peers_refused"),
    *("served_connections_accepted", "served_connections_refused", "served_keys_looked_up", "served_blocks_sent"),
    *("served_bytes_sent", "served_blocks_from_storage", "served_blocks_absent"),
    *("directory_rounds", "directory_failures", "directory_entries_refused"),
    *("directory_summaries_read", "directory_bytes_read"),
)

_RETRIES_MAX: Final = 10.0
_RETRY_SHARE: Final = 0.1
"""Retries of loads, at most a tenth of all loads after an initial allowance. They help after a lost connection, and if
another peer has the block."""


@dataclass(slots=True)
class _Search:
    """Answers of several peers."""

    found: dict[BlockKey, Found] = field(default_factory=dict)
    """The best answer about each block that is there or coming."""
    waiting: set[bytes] = field(default_factory=set)  # Hand-overs whose blocks the named peer does not know yet.
    answered: set[Peer] = field(default_factory=set)  # Peers that answered.
    error: str = ""  # Error of a peer that did not answer; empty if all did.


class PeerBackend(PeerMedium):
    """Loads blocks from other engines, and serves them the blocks of our own primary tier.

    Each lookup concurrently queries all configured peers, the peers that the request names, and up to two peers that
    the directory names. A block is loaded from a peer that has it. Stores do nothing: blocks stay where they were
    computed.
    """

    name: ClassVar[str] = "peer"
    config_type: ClassVar[type[TierConfig]] = PeerConfig
    medium = Medium.CPU
    locality = Locality.REMOTE
    takes_stores = False

    def __init__(self, config: PeerConfig, limits: Limits = LIMITS) -> None:
        super().__init__(config)
        self.config: PeerConfig = config
        self._limits = limits
        self._source: Lender | None = None
        self._server: PeerServer | None = None
        self._namespace: Namespace | None = None
        self._tls: TLS | None = None
        self._listed: dict[Endpoint, Peer] = {}
        self._named: BoundedDict[Endpoint, Peer] = BoundedDict(limits.named_max)
        self._directory: Directory | None = None
        self._found: BoundedDict[Endpoint, Peer] = BoundedDict(limits.found_max)
        self._places: BoundedDict[BlockKey, Endpoint] = BoundedDict(_PLACES_MAX)
        self._senders: BoundedDict[BlockKey, Endpoint] = BoundedDict(_SENT_MAX)
        """Peers that sent the blocks not yet verified; meanwhile a lookup may find another peer for the next load."""
        self._budget = RetryBudget(_RETRIES_MAX, _RETRY_SHARE)
        self._strangers = RetryBudget(_STRANGERS_MAX, _STRANGERS_SHARE)
        self._log = PeerLog()
        self._counts = Counter(dict.fromkeys(_COUNTED, 0))
        self._under_way = CallsUnderWay()
        self._leaving: set[asyncio.Task[None]] = set()

    def set_lender(self, lender: Lender) -> bool:
        self._source = lender
        return bool(self.config.listen)

    def check(self) -> None:
        check_tls(_loading_tls(self.config))
        check_tls(serving_tls(self.config))
        if self.config.directory is not None:
            Directory.check(self.config.directory)

    async def open(self, namespace: Namespace, geometry: RecordGeometry) -> None:
        """Listen, if configured. Connections to peers are opened on first use.

        Raises:
            ConfigError: There is no primary tier to serve, or a certificate can't be used.
            BackendUnavailableError: The listening address is not available.
        """
        config = self.config
        # That of the epoch before has counted its refusals.
        self._tls = self._tls or _loading_tls(config)
        if self._tls is not None:
            await self._tls.current()
        if config.listen:
            if self._source is None:
                raise ConfigError(NOTHING_TO_SERVE)
            self._server = PeerServer(
                config, self._source, namespace, self._counts, geometry.payload_bytes_max, self._limits
            )
            await self._server.open()
            logger.info("Serving blocks to peers on %s", config.listen)
        self._namespace = namespace
        listed = [endpoint_of(address) for address in config.peers if address != config.listen]
        self._listed = {endpoint: self._peer(endpoint) for endpoint in listed}
        if config.directory is not None:
            own = config.published
            self._directory = Directory(config.directory, namespace.hex, own, self._server, self._counts, self._limits)

    async def close(self) -> None:
        self._namespace = None
        peers = self._peers()
        self._listed, server, self._server = {}, self._server, None
        directory, self._directory = self._directory, None
        self._named.clear()
        self._found.clear()
        self._places.clear()
        self._senders.clear()
        for peer in peers:
            self._close_later(peer)
        # In reverse order, each also if this is cancelled: the listener would go on lending rows.
        async with AsyncExitStack() as closing:
            if server is not None:
                closing.push_async_callback(server.close)
            if directory is not None:
                closing.push_async_callback(directory.close)
            if self._leaving:
                await asyncio.wait(self._leaving)
        # Running calls have failed by now and are about to return.
        await self._under_way.ended()

    async def exists(self, keys: Sequence[BlockKey]) -> Sequence[bool | None]:
        answers, _ = await self.exists_at(keys, ())
        return [None if answer is Found.UNKNOWN else answer is Found.THERE for answer in answers]

    async def exists_at(
        self, keys: Sequence[BlockKey], sources: Sequence[Source]
    ) -> tuple[Sequence[Found], Sequence[Found]]:
        """Query the configured peers, the peer that requests name if permitted, and two that the directory names.

        Returns:
            For each key THERE if a peer has the block; else COMING if one computes it; else UNKNOWN if a peer that
            might have it did not answer; else ABSENT. And the state of each source, see :meth:`PeerMedium.exists_at`.

        Raises:
            PeerError: No peer could be queried.
        """
        self._ready()
        with self._under_way:
            named = self._named_peer(sources[0].address) if sources else None
            peers, untried = self._peers_for(keys)
            if named is not None:
                peers[named] = None
            search = await self._find(dict.fromkeys(peers, keys), named, [one.hand_over for one in sources])
        # If the set of peers changes, a failed peer must not make the tier stop querying the others.
        if search.error and not search.answered and not self.config.request_peers and self._directory is None:
            raise PeerError(search.error)
        missing = Found.UNKNOWN if search.error or untried else Found.ABSENT
        states = [Found.COMING if one.hand_over in search.waiting else Found.ABSENT for one in sources]
        if named not in search.answered:
            states = [Found.UNKNOWN] * len(sources)
        return [search.found.get(key, missing) for key in keys], states

    async def put(self, writes: Sequence[RecordWrite]) -> Sequence[Outcome]:
        """Store nothing: blocks stay where they were computed."""
        self._ready()
        return [Outcome.SHED] * len(writes)

    async def get_into(self, reads: Sequence[RecordRead]) -> Sequence[Outcome]:
        self._ready()
        outcomes = [Outcome.MISS] * len(reads)
        with self._under_way:
            self._budget.earn()
            await self._load(reads, range(len(reads)), outcomes)
            failed = [place for place, outcome in enumerate(outcomes) if outcome is Outcome.IO_ERROR]
            if failed and self._budget.spend():
                self._ready()
                await self._load(reads, failed, outcomes, again=True)
            self._ready()
        return outcomes

    async def delete(self, keys: Sequence[BlockKey]) -> Sequence[bool]:
        """Delete nothing: the blocks belong to other engines."""
        self._ready()
        return [False] * len(keys)

    async def scan(self) -> AsyncIterator[BlockInfo]:
        """Yield nothing: peers are only queried by lookups."""
        self._ready()
        return
        yield

    def note_read(self, intact: Sequence[BlockKey], damaged: Sequence[BlockKey]) -> None:
        """Restore trust in the peers that sent intact blocks, and stop querying those that sent damaged ones."""
        for keys, note in ((intact, Peer.note_verified), (damaged, Peer.note_damaged)):
            for endpoint in {self._senders.pop(key, None) for key in keys}:
                peer = self._peer_at(endpoint)
                if peer is not None:
                    note(peer)
        for key in damaged:
            self._places.pop(key, None)

    def stats(self) -> BackendStats:
        peers = self._peers()
        server = self._server
        refusals = sum(secret.refusals for secret in self.config.secrets.values())
        refusals += self._tls.refusals if self._tls else 0
        refusals += self._directory.tls_refusals if self._directory else 0
        return BackendStats(
            counters={**self._counts, "credentials_refused": refusals},
            gauges={
                "peers": float(len(peers)),
                "peers_down": float(sum(peer.down for peer in peers)),
                "peers_of_other_namespaces": float(sum(peer.is_foreign for peer in peers)),
                "directory_engines": float(self._directory.engines if self._directory else 0),
                "served_connections": float(server.connection_count if server else 0),
                "served_loads": float(server.rows_lent if server else 0),
            },
            ready=not peers or not all(peer.down for peer in peers),
        )

    async def _find(
        self, wanted: Mapping[Peer, Sequence[BlockKey]], named: Peer | None = None, hand_overs: Sequence[bytes] = ()
    ) -> _Search:
        """Query each peer for some blocks, concurrently, and remember a peer for each block found.

        ``hand_overs``: their names; empty ones are skipped.
        """
        search = _Search()
        asked = [peer for peer in wanted if peer.admits()]
        search.error = next((peer.last_error for peer in wanted if peer not in asked), "")
        strangers = [peer for peer in asked if not peer.has_answered and peer.endpoint in self._found]
        for _ in strangers:
            self._strangers.spend()
        names = [name for name in hand_overs if name]
        calls = [peer.lookup(wanted[peer], names if peer is named else ()) for peer in asked]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        self._strangers.give_back(sum(peer.has_answered for peer in strangers))
        self._ready()
        places: dict[BlockKey, Peer] = {}
        for peer, answer in zip(asked, answers, strict=True):
            if isinstance(answer, PeerError):
                search.error = peer.last_error
            elif isinstance(answer, BaseException):
                raise answer
            else:
                search.answered.add(peer)
                codes, waiting = answer
                search.waiting |= waiting
                for key, there in zip(wanted[peer], codes, strict=True):
                    best = places.get(key)
                    if there == Found.THERE and (best is None or peer.loading < best.loading):
                        places[key], search.found[key] = peer, Found.THERE
                    elif there == Found.COMING and best is None:
                        search.found[key] = Found.COMING
        for key, place in places.items():
            self._places[key] = place.endpoint
        return search

    async def _load(
        self, reads: Sequence[RecordRead], wanted: Sequence[int], outcomes: list[Outcome], *, again: bool = False
    ) -> None:
        """Load some of the reads, each from a peer that has the block, and set their outcomes.

        With ``again``, each block is first looked up once more, also at the peer that had it.
        """
        keys = [reads[index].key for index in wanted]
        lost = keys if again else [key for key in keys if self._peer_of(key) is None]
        error = ""
        if lost:
            peers, _ = self._peers_for(lost)
            questions = {peer: list(lost) for peer in peers}
            for key in lost:
                # A peer named by a request is queried only about blocks that it had.
                holder = self._peer_at(self._places.pop(key, None))
                if holder is not None and holder not in peers:
                    questions.setdefault(holder, []).append(key)
            error = (await self._find(questions)).error
        groups: dict[Peer, list[int]] = defaultdict(list)
        for index in wanted:
            peer = self._peer_of(reads[index].key)
            if peer is not None:
                groups[peer].append(index)
            else:
                outcomes[index] = Outcome.IO_ERROR if error else Outcome.MISS
                self.last_error = error or self.last_error
        if not groups:
            return
        async with asyncio.TaskGroup() as tasks:
            for peer, group in groups.items():
                tasks.create_task(self._load_from(peer, [reads[index] for index in group], group, outcomes))

    async def _load_from(
        self, peer: Peer, reads: Sequence[RecordRead], places: Sequence[int], outcomes: list[Outcome]
    ) -> None:
        for place, read, outcome in zip(places, reads, await peer.load(reads), strict=True):
            outcomes[place] = outcome
            if outcome is Outcome.OK:
                self._senders[read.key] = peer.endpoint
            if outcome.is_failure:
                self.last_error = peer.last_error

    def _peer_of(self, key: BlockKey) -> Peer | None:
        """Return the peer that has a block, if one is known and available."""
        peer = self._peer_at(self._places.get(key))
        return peer if peer is not None and peer.admits() else None

    def _ready(self) -> Namespace:
        if self._namespace is None:
            raise BackendClosedError("not open: use it after open() and before close()", backend=self.name)
        return self._namespace

    def _peer(self, endpoint: Endpoint) -> Peer:
        return Peer(endpoint, self.config, self._tls, self._ready().digest, self._counts, self._log, self._limits)

    def _peers(self) -> list[Peer]:
        return [*self._listed.values(), *self._named.values(), *self._found.values()]

    def _named_peer(self, source: str) -> Peer | None:
        """Return the peer that a request names; None if the address is invalid or not permitted."""
        try:
            endpoint = endpoint_of(source)
        except ConfigError:
            endpoint = None
        if endpoint in self._listed:
            return self._listed[endpoint]
        if endpoint is None or not self.config.may_name(endpoint):
            self._counts["named_peers_refused"] += 1
            if self._counts["named_peers_refused"] == 1:
                logger.warning("A request names the peer %r, which 'request_peers' does not allow.", source[:80])
            return None
        return self._remembered(endpoint, self._named)

    def _peer_at(self, endpoint: Endpoint | None) -> Peer | None:
        """Return the peer at an endpoint that had a block, also if it was removed since."""
        if endpoint is None:
            return None
        known = self._listed.get(endpoint) or self._named.get(endpoint) or self._found.get(endpoint)
        return known or self._remembered(endpoint, self._named)

    def _peers_for(self, keys: Sequence[BlockKey]) -> tuple[dict[Peer, None], bool]:
        """Return the configured peers, and up to two that the directory names for some blocks.

        Its best candidates are queried if all of them have answered before and are available. Otherwise the best proven
        peer is queried, and beside it an unproven candidate within the budget for these, else a second proven peer.
        Without budget, unproven candidates are tried in the background.

        Returns:
            The peers, and whether an unproven candidate was left out.
        """
        listed = dict.fromkeys(self._listed.values())
        if self._directory is None:
            return listed, False
        self._strangers.earn()
        known = [*self._named.values(), *self._found.values()]
        barred = self._listed.keys() | {peer.endpoint for peer in known if peer.paused}
        best = self._found_at(self._directory.candidates(keys, _CANDIDATES_MAX, barred))
        untried = [peer for peer in best if not (peer.has_answered and peer.ready)]
        if not untried:
            return listed | dict.fromkeys(best), False
        proven = {peer.endpoint for peer in known if peer.has_answered and not peer.down}
        others = self._found_at(self._directory.candidates(keys, _CANDIDATES_MAX, self._directory.known - proven))
        ready = [peer for peer in untried if peer.ready and self._strangers.tokens >= 1]
        asked = [*others[:1], *ready, *others[1:]][:_CANDIDATES_MAX]
        room = min(_TRIALS_AT_ONCE, _TRIALS_MAX - sum(peer.trying for peer in known))
        if room > 0 and not ready:
            for peer in self._found_at(self._directory.candidates(keys, room, barred | proven)):
                if peer.admits():
                    peer.start_trial()
        return listed | dict.fromkeys(asked), not set(untried) <= set(asked)

    def _found_at(self, endpoints: Iterable[Endpoint]) -> list[Peer]:
        peers = [self._named.get(endpoint) or self._remembered(endpoint, self._found) for endpoint in endpoints]
        return [peer for peer in peers if peer is not None]

    def _remembered(self, endpoint: Endpoint, peers: BoundedDict[Endpoint, Peer]) -> Peer | None:
        """Return the peer at an endpoint; None if ``peers`` is full and each has a load under way.

        A new peer replaces one without a load: preferably without calls, then one that has never answered, then the
        least recently named.
        """
        peer = peers.get(endpoint)
        if peer is None:
            peer = self._peer(endpoint)
            if len(peers) == peers.most:
                removable = [one for one in peers.values() if not one.loading]
                if not removable:
                    return None
                self._close_later(peers.pop(min(removable, key=lambda one: (one.busy, one.has_answered)).endpoint))
        # Moves the peer to the end, so that it is removed last.
        peers[endpoint] = peer
        return peer

    def _close_later(self, peer: Peer) -> None:
        task = asyncio.get_running_loop().create_task(peer.close())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)


def _loading_tls(config: PeerConfig) -> TLS | None:
    """Return the TLS settings for connections to peers; None without TLS."""
    if not config.tls:
        return None
    return client_tls(
        ca=config.tls_ca, cert=config.tls_cert, key=config.tls_key, check_hostname=config.tls_check_hostname
    )
