"""Codec and seal: the steps between a block and the payload that lies on the medium.

A **codec** makes payloads shorter, or easier to make shorter for the next one; a **seal** authenticates them and may
encrypt them. Both are named in a tier's ``codec`` option and known in records by a wire id, by which they are read
again, whatever the tier is set to by then. To add one, subclass :class:`Codec`, give it wire ids from 128 to 255, name
it ``"module:Class"`` or in the entry point group ``kvstore.codecs``, and subclass :class:`kvstore.testing.CodecTests`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import msgspec

from kvstore.codec.names import KeyedNames
from kvstore.namespace import Namespace

__all__ = ["MAC_FIELD_BYTES", "THIRD_PARTY_WIRE_ID_MIN", "Codec", "CodecContext", "NoOptions", "Seal", "Step"]

MAC_FIELD_BYTES: Final = 32
"""Length of a header's field for the MAC (and whatever else opening needs, such as a nonce)."""

THIRD_PARTY_WIRE_ID_MIN: Final = 128
"""Wire ids from here to 255 are for codecs that don't ship with kvstore."""


class NoOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a step that has none."""


@dataclass(frozen=True, slots=True)
class CodecContext:
    """What a step may know of the blocks that it is for.

    Attributes:
        namespace: Their namespace.
        element_bytes: Length of an element of the KV cache in bytes, as the namespace's dtype tells it; 1 where it
            does not (and for types of one byte).
    """

    namespace: Namespace
    element_bytes: int = 1


class Step(ABC):
    """One step of a chain; made once per tier.

    Attributes:
        name: Name in configurations.
        wire_ids: Every id under which records name it, from 1 to 255. An id is never given another meaning.
        options_type: Struct that its options are decoded into; every option has a default.
        shorthand: Name of the option that ``"name:value"`` sets; empty if there is none.

    Args:
        options: An ``options_type``.
        context: What the blocks are.

    Raises:
        ConfigError: The options can't be used.
    """

    name: ClassVar[str]
    wire_ids: ClassVar[tuple[int, ...]]
    options_type: ClassVar[type[msgspec.Struct]] = NoOptions
    shorthand: ClassVar[str] = ""

    def __init__(self, options: Any, context: CodecContext) -> None:
        self.options = options
        self.context = context

    @property
    def wire_id(self) -> int:
        """Id that records written with it get; 0 if it does nothing for these blocks and is left out."""
        return self.wire_ids[0]


class Codec(Step):
    """Encodes and decodes payloads, many at a time.

    Guarantees that every codec gives, and that ``kvstore.testing.CodecTests`` checks:

    * Threads may share it, and it keeps nothing from one call to the next that changes what comes out.
    * Each payload of a batch has a result of its own: one bad one is no exception, and spoils no other.
    * Nothing is written outside of a target, and sources are only read. No buffer is touched after the call.
    * What a source declares of its own size is checked against its target before anything is allocated for it.
    * Whatever a source holds, ``decode`` ends in time and memory proportional to its target.

    Buffers are one-dimensional, of bytes and C-contiguous; sources and targets don't overlap.
    """

    def encoded_bytes_max(self, plain_bytes: int) -> int:
        """Return the most bytes that ``plain_bytes`` can become; the default says that nothing gets longer."""
        return plain_bytes

    @abstractmethod
    def encode(self, sources: Sequence[memoryview], targets: Sequence[memoryview]) -> Sequence[int | None]:
        """Encode each source to the start of its target.

        Args:
            sources: Payloads.
            targets: As many; may be shorter than ``encoded_bytes_max`` of the source.

        Returns:
            Bytes written to each target; None where they would not fit, and the target's content means nothing.
        """

    @abstractmethod
    def decode(
        self, wire_id: int, sources: Sequence[memoryview], targets: Sequence[memoryview]
    ) -> Sequence[int | None]:
        """Decode each source to the start of its target; the inverse of :meth:`encode`.

        Args:
            wire_id: The one of ``wire_ids`` that the records name.
            sources: What :meth:`encode` made, or anything else.
            targets: As many. The last step of a chain gets targets of exactly the plain length.

        Returns:
            Bytes written to each target; None where the source is not the whole of what :meth:`encode` made, or does
            not fit.
        """


class Seal(Step):
    """Authenticates records, and may encrypt their payloads; the last step of a chain.

    A sealed payload has the length of the unsealed one; whatever else opening needs stands in the header's field for
    the MAC. Threads may share a seal.

    Attributes:
        hides: Whether it encrypts: then the sealed payload is in ``out``. Otherwise the payload stays as and where
            it is, and ``out`` is not used.
        names: From keys to the names that media and headers see instead; None: the keys themselves.
        accepts_unsealed: Whether a tier with this seal also believes records without one, as it has to while it still
            has some from before.
    """

    hides: ClassVar[bool]
    names: KeyedNames | None = None
    accepts_unsealed: bool = False

    @property
    @abstractmethod
    def key_id(self) -> int:
        """Id of the key to seal with now, from 1 to 2**32 - 1; may change from one call to the next (rotation)."""

    @abstractmethod
    def seal(self, key_id: int, associated: bytes, payload: memoryview, out: memoryview) -> bytes:
        """Seal one payload.

        Args:
            key_id: What :attr:`key_id` said; it is in ``associated`` too.
            associated: The header up to its checksum, with zeros for the payload's checksum and the MAC: magic,
                version, lengths, namespace, key, writer, time, chain and key id are bound to the payload by it.
            payload: Read only.
            out: As long as ``payload``, elsewhere; empty for a seal that does not hide.

        Returns:
            The header's field for the MAC, ``MAC_FIELD_BYTES`` long.

        Raises:
            RecordError: The key has gone; the record is not stored.
        """

    @abstractmethod
    def open(
        self, wire_id: int, key_id: int, associated: bytes, mac: bytes, payload: memoryview, out: memoryview
    ) -> bool:
        """Open one payload, or refuse it.

        Args:
            wire_id: The one of ``wire_ids`` that the record names.
            key_id: As the record says.
            associated: As for :meth:`seal`, of the record that was read.
            mac: The header's field for the MAC.
            payload: The sealed payload.
            out: Where the plain one goes, as long as ``payload``; may be ``payload`` itself. Always given, and unused
                if it was not hidden.

        Returns:
            Whether the plain payload is in ``out``; if not, ``payload`` is it.

        Raises:
            RecordError: ``RecordFault.CODEC`` if the key is not known (warned of once per key id), ``RecordFault.SEAL``
                if the record was not sealed by it. What is in ``out`` then means nothing.
        """
