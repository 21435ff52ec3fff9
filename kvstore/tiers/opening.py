"""Opening a tier: from a configuration to its two halves, joined by a channel."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from kvstore.backends.base import Backend, PeerMedium, SharedMedium
from kvstore.config import TierConfig, decode_config
from kvstore.errors import BackendUnavailableError, ConfigError
from kvstore.namespace import Namespace
from kvstore.primary.lending import Lender
from kvstore.registry import BACKENDS
from kvstore.runtime.host import attach_to_shared_host
from kvstore.runtime.messages import Channel, FromIO
from kvstore.runtime.process import ProcessChannel, ProcessSpec, find_backing
from kvstore.tenants import Tenants
from kvstore.tiers.async_tier import AsyncTier
from kvstore.tiers.codecs import namespace_with_codecs
from kvstore.tiers.lent import LentProcess
from kvstore.tiers.preflight import check_before_opening
from kvstore.tiers.tier_io import TierIO, TierIOSpec
from kvstore.tiers.url import tier_of_url
from kvstore.types import Locality, Medium

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

logger = logging.getLogger("kvstore.tiers")

_OPEN_TIMEOUT_S = 60.0
"""Time limit for opening. A backend opens in milliseconds and recovers in the background; a slower medium counts as
missing."""

_RECOVERY_WAIT_S = 1.0
"""Longest wait of an opening tier for its recovery, so that the first lookups are answered immediately. The tables of a
hundred thousand blocks need a fraction of it. Longer recovery continues in the background."""


def open_tier(
    config: Mapping[str, Any] | str,
    *,
    primary: WriteableBuffer,
    slot_bytes: int,
    namespace: Namespace,
    name: str = "",
    wrap_backend: Callable[[Backend], Backend] | None = None,
    lender: Lender | None = None,
    events: bool = True,
    access_events: bool = False,
    tenants: Tenants | None = None,
    io: Literal["thread", "process"] = "thread",
) -> AsyncTier:
    """Open a secondary tier.

    Args:
        config: The tier's JSON object (``backend`` or ``type``, and its options) or URL (``file:///kv?capacity=1TiB``).
        primary: Memory of the primary tier (a memoryview, an mmap, an array); C-contiguous, writable, rows of
            ``slot_bytes``. Page-aligned rows that are multiples of 4096 bytes are moved without a copy. Held until the
            tier is closed. With ``"io": "process"`` it must be shared memory: a mapped file, or a memfd.
        slot_bytes: Length of a row in bytes.
        namespace: All properties that change the bytes of a block, except options of the tier, which are added.
        name: Name in statistics; by default the option ``label``, or the backend's name without one.
        wrap_backend: Wraps the backend, for example in ``kvstore.testing.FaultyBackend``; thread host only.
        lender: Source of rows that a backend may serve to other engines; None if no tier of this engine serves any.
        events: Whether ``take_events`` reports the blocks; this needs memory for their keys.
        access_events: Whether it reports loads, too, one event per job.
        tenants: The tenants that share the medium; keys begin with their tags.
        io: Host of the I/O side with ``"io": "auto"``; a thread has tiers in memory and peer tiers that listen.

    Raises:
        ConfigError: The configuration can't be used; the medium is unchanged.
        BackendError: The medium refuses, and the tier is ``required``.
    """
    _check_arguments(slot_bytes, namespace)
    kind, options = _split(config)
    backend = _made(kind, options, tenants)
    namespace = namespace_of_tier(namespace, decoded := backend.config)
    serves = lender is not None and isinstance(backend, PeerMedium) and backend.set_lender(lender)
    reader = None if lender is None else _reader_of(backend)
    lent, backend = backend, wrap_backend(backend) if wrap_backend is not None else backend
    name = name or decoded.label or backend.name
    # The I/O side has its own views and releases them at the end.
    with _memory_of(primary) as memory:
        channel = None
        spec = TierIOSpec(backend, decoded, namespace, memory, slot_bytes, lineage=events, kind=kind)
        if _host(backend, io, serves=serves) == "process" and wrap_backend is None:
            channel = _opened_process(name, options, tenants, spec, reader)
        if lender is not None and reader is not None:
            lender.backends.append(lent if channel is None else reader)
        tier = AsyncTier(
            channel or _opened_thread(spec),
            decoded,
            name=name,
            medium=backend.medium,
            locality=backend.locality,
            authoritative=backend.authoritative,
            slot_bytes=slot_bytes,
            slot_count=memory.nbytes // slot_bytes,
            takes_stores=backend.takes_stores,
            verifies_events=events and backend.evicts_silently,
            lender=lender,
            events=events,
            access_events=access_events,
        )
        tier.wait_recovered(_RECOVERY_WAIT_S)
        return tier


def _reader_of(backend: Backend) -> Backend | None:
    """Return a reader of a medium whose records may be sent to peers; None if there is none."""
    # Encoded and sealed records need a decoder or a key, which a peer may not have.
    return backend.reader() if isinstance(backend, SharedMedium) and backend.config.codec == "raw" else None


def _check_arguments(slot_bytes: object, namespace: object) -> None:
    """Refuse arguments of other types, which would fail later, and further from the mistake."""
    if not isinstance(namespace, Namespace):
        raise ConfigError(
            f"'namespace' is a {type(namespace).__name__}. Expected a kvstore.Namespace, such as "
            'Namespace({"model": "my-model", "dtype": "bfloat16"}).'
        )
    if not isinstance(slot_bytes, int) or isinstance(slot_bytes, bool):
        raise ConfigError(f"'slot_bytes' is {slot_bytes!r}. Expected a number of bytes, such as 4096.")


def check_tier(config: Mapping[str, Any] | str) -> None:
    """Check a tier that is opened later, with its directories; changes nothing.

    Raises:
        ConfigError: A value can't be used.
    """
    kind, options = _split(config)
    check_before_opening(kind, _made(kind, options, tenants=None).config)


def _open(channel: Channel) -> None:
    try:
        channel.open(_OPEN_TIMEOUT_S)
    except BaseException:
        channel.close(_OPEN_TIMEOUT_S)
        raise


def make_io_side(
    payload: Mapping[str, Any],
    primary: memoryview,
    post: Callable[[FromIO], None],
    room: Callable[[], Awaitable[None]],
) -> TierIO:
    """Create the I/O half of a tier in a child process; the counterpart of ``_opened_process``."""
    backend = _made(payload["backend"], payload["options"], msgspec.convert(payload["tenants"], Tenants | None))
    namespace = Namespace(payload["namespace"]["fields"])
    if namespace.hex != payload["namespace"]["digest"]:
        namespace = Namespace.of_digest(bytes.fromhex(payload["namespace"]["digest"]))
    slot_bytes, kind = payload["slot_bytes"], payload["backend"]
    spec = TierIOSpec(backend, backend.config, namespace, primary, slot_bytes, lineage=True, kind=kind)
    return TierIO(spec, post, room)


def _made(kind: str, options: Mapping[str, Any], tenants: Tenants | None) -> Backend:
    """Create a backend without opening it."""
    cls = BACKENDS.find(kind)
    backend: Backend = cls(decode_config(cls.config_type, options, where=f"{kind} tier"))
    backend.tenants = tenants
    return backend


def namespace_of_tier(namespace: Namespace, config: TierConfig) -> Namespace:
    """Return an engine's namespace with the options of a tier that change the bytes of a block."""
    if config.namespace:
        namespace = namespace.with_fields(user_namespace=config.namespace)
    return namespace_with_codecs(namespace, config.codec)


def _split(config: Mapping[str, Any] | str) -> tuple[str, dict[str, Any]]:
    """Return the name of a tier's backend, and the other options."""
    options = tier_of_url(config) if isinstance(config, str) else dict(config)
    named, typed = options.pop("backend", None), options.pop("type", None)
    kind = named or typed
    if not isinstance(kind, str):
        raise ConfigError('A tier needs "backend": the name of its backend, such as "file".')
    return kind, options


def _memory_of(primary: WriteableBuffer) -> memoryview:
    try:
        return memoryview(primary)
    except TypeError:
        raise ConfigError(
            f"'primary' is a {type(primary).__name__}. Expected writable memory, such as an mmap or a bytearray."
        ) from None


def _host(backend: Backend, io: Literal["thread", "process"], *, serves: bool) -> Literal["thread", "process"]:
    """Return the host of the I/O side; ``io`` is what "auto" means for most tiers."""
    if backend.config.io != "auto":
        return backend.config.io
    # Blocks in memory would end with an I/O process.
    is_memory = backend.medium is Medium.CPU and backend.locality is Locality.LOCAL
    return "thread" if serves or is_memory else io


def _opened_thread(side: TierIOSpec) -> Channel:
    channel = attach_to_shared_host(lambda post: TierIO(side, post))
    _open(channel)
    return channel


def _opened_process(
    name: str, options: Mapping[str, Any], tenants: Tenants | None, side: TierIOSpec, reader: Backend | None
) -> ProcessChannel | None:
    """Return the open channel to an I/O process; None, with a warning, if this process can have none.

    ``side``: The I/O half as it would be here; ``reader``: reads its medium for peers, which otherwise get no block.
    """
    payload = {"backend": side.kind, "options": options, "tenants": tenants, "slot_bytes": side.slot_bytes}
    payload["namespace"] = side.namespace.document()
    # Through JSON and back, so that values that cannot be sent fail here at start instead of in the child.
    plain = msgspec.json.decode(msgspec.json.encode(payload))
    try:
        backing = find_backing(side.primary)
        if backing is not None:
            spec = ProcessSpec(f"{__name__}:make_io_side", plain, backing, name)
            channel = ProcessChannel(spec) if reader is None else LentProcess(spec, reader, side)
            _open(channel)
            return channel
        reason = "it needs a primary tier in shared memory that can be opened again; this one is private"
    except (OSError, RuntimeError) as error:  # The machine allows no further process, thread or descriptor.
        reason = f"it can't be started: {error}"
    except BackendUnavailableError as error:
        if side.config.required:
            raise
        # The process has ended: an absent medium is no error here.
        reason = f"it ended at its start: {error}"
    logger.warning("Tier %s has no I/O process (%s). Its I/O runs on a thread instead.", name, reason)
    return None
