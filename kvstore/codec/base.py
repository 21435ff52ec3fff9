"""Codec and seal: the steps between a block and the payload on the medium.

A **codec** shortens payloads, or prepares them for the next codec; a **seal** authenticates payloads and may encrypt
them. A tier's ``codec`` option names both. Records identify them by wire id, so they can be read after the option has
changed. To add a codec, subclass :class:`Codec`, give it wire ids from 128 to 255, name it ``"module:Class"`` or in the
entry point group ``kvstore.codecs``, and subclass :class:`kvstore.testing.CodecTests`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol

import msgspec

from kvstore.namespace import Namespace
from kvstore.types import BlockKey

MAC_FIELD_BYTES: Final = 32
"""Length of the header's field for the seal's data, such as MAC and nonce."""

THIRD_PARTY_WIRE_ID_MIN: Final = 128
"""Wire ids from here to 255 are for third-party codecs."""


class NoOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a step that has none."""


@dataclass(frozen=True, slots=True)
class CodecContext:
    """Properties of the blocks that a step processes."""

    namespace: Namespace  # Their namespace.
    element_bytes: int = 1  # Length of an element of the KV cache in bytes, from the namespace's dtype; 1 if unknown.


class Step(ABC):
    """One step of a chain; created once per tier.

    Args:
        options: An ``options_type``.
        context: Properties of the blocks.

    Raises:
        ConfigError: An option is invalid.
    """

    name: ClassVar[str]  # Name in configurations.
    wire_ids: ClassVar[tuple[int, ...]]  # Its ids in records, from 1 to 255. The meaning of an id never changes.
    options_type: ClassVar[type[msgspec.Struct]] = NoOptions  # Struct of its options; every option has a default.
    shorthand: ClassVar[str] = ""  # Name of the option that ``"name:value"`` sets; empty for none.

    def __init__(self, options: Any, context: CodecContext) -> None:
        self.options = options
        self.context = context

    @property
    def wire_id(self) -> int:
        """Id in the records that the step writes; 0 if the step has no effect on these blocks and is omitted."""
        return self.wire_ids[0]


class Codec(Step):
    """Encodes and decodes payloads, many at a time.

    Guarantees of every codec, checked by ``kvstore.testing.CodecTests``:

    * Threads may share it, and no state of one call changes the result of another.
    * Each payload of a batch has its own result: a bad payload raises no exception and does not affect the others.
    * Writes stay within targets, and sources are only read. No buffer is touched after the call.
    * A size declared by a source is checked against its target before memory is allocated for it.
    * For any source, ``decode`` takes time and memory proportional to its target.

    Buffers are one-dimensional, of bytes and C-contiguous; sources and targets don't overlap.
    """

    def encoded_bytes_max(self, plain_bytes: int) -> int:
        """Return the greatest encoded length of ``plain_bytes``; by default ``plain_bytes``."""
        return plain_bytes

    @abstractmethod
    def encode(self, sources: Sequence[memoryview], targets: Sequence[memoryview]) -> Sequence[int | None]:
        """Encode each source to the start of its target.

        Args:
            sources: Payloads.
            targets: As many; may be shorter than ``encoded_bytes_max`` of the source.

        Returns:
            Bytes written to each target; None where they would not fit, with undefined content.
        """

    @abstractmethod
    def decode(
        self, wire_id: int, sources: Sequence[memoryview], targets: Sequence[memoryview]
    ) -> Sequence[int | None]:
        """Decode each source to the start of its target; the inverse of :meth:`encode`.

        Args:
            wire_id: The id in the records, one of ``wire_ids``.
            sources: Results of :meth:`encode`, or arbitrary bytes.
            targets: As many. The last step of a chain gets targets of exactly the plain length.

        Returns:
            Bytes written to each target; None if the source is not a complete result of :meth:`encode`, or does not
            fit.
        """


class KeyNames(Protocol):
    """Mapping between keys and their names on the medium. Threads may share it."""

    def name_of(self, key: BlockKey) -> BlockKey:
        """Return the name of a key."""

    def key_of(self, name: BlockKey) -> BlockKey | None:
        """Return the key of a name; None if the name was made with another secret."""


class Seal(Step):
    """Authenticates records, and may encrypt their payloads; the last step of a chain.

    Sealing keeps the length of a payload; data such as nonce and tag is in the header's field for the MAC. Threads may
    share a seal.
    """

    hides: ClassVar[bool]
    """Whether it encrypts. If so, the sealed payload is in ``out``; otherwise the payload is unchanged and ``out`` is
    unused."""
    names: KeyNames | None = None  # Names that replace keys on media and in headers; None to use the keys themselves.
    accepts_unsealed: bool = False
    """Whether a tier with this seal also accepts unsealed records, for a tier that was used without a seal before."""

    @property
    @abstractmethod
    def key_id(self) -> int:
        """Id of the current sealing key, from 1 to 2**32 - 1; may change between calls (rotation)."""

    @abstractmethod
    def seal(self, key_id: int, associated: bytes, payload: memoryview, out: memoryview) -> bytes:
        """Seal one payload.

        Args:
            key_id: A value of :attr:`key_id`; also part of ``associated``.
            associated: The header up to its checksum, with zeros for the payload's checksum and the MAC: magic,
                version, lengths, namespace, key, writer, time, chain and key id. The seal binds them to the payload.
            payload: The payload, which is only read.
            out: A separate buffer as long as ``payload``; empty for a seal that does not encrypt.

        Returns:
            The header's field for the MAC, ``MAC_FIELD_BYTES`` long.

        Raises:
            RecordError: The key is gone; the record is not stored.
        """

    @abstractmethod
    def open(
        self, wire_id: int, key_id: int, associated: bytes, mac: bytes, payload: memoryview, out: memoryview
    ) -> bool:
        """Verify one payload, and decrypt it if it was encrypted.

        Args:
            wire_id: The id in the record, one of ``wire_ids``.
            key_id: Key id in the record.
            associated: As for :meth:`seal`, from the record's header.
            mac: The header's field for the MAC.
            payload: The sealed payload.
            out: Buffer for the plain payload, as long as ``payload``; may be ``payload`` itself. Unused if the payload
                was not encrypted.

        Returns:
            True if the plain payload is in ``out``, False if ``payload`` itself is plain.

        Raises:
            RecordError: ``RecordFault.CODEC`` if the key is unknown (logged once per key id), ``RecordFault.SEAL`` if
                the record was not sealed with it. The content of ``out`` is then undefined.
        """
