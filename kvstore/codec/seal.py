"""Seals: AES-256-GCM encryption and authentication (``aead``), or authentication only (``mac``).

Sealing keys are derived from the keyring's keys for one namespace, one use and one writer. A nonce can therefore only
repeat among the records of one opened tier, and random nonces of 96 bits are safe for 2**32 records (NIST SP 800-38D,
section 8.3): with blocks of 128 KiB, half a petabyte per start of an engine.

The header's field for the MAC holds nonce (12 bytes), tag (16) and zeros (4).
"""

from __future__ import annotations

import os
from typing import Any, ClassVar, Final

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import AEADEncryptionContext, Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESSIV

from kvstore.codec.base import MAC_FIELD_BYTES, CodecContext, Seal
from kvstore.codec.keyring import Keyring, KeySource, hkdf_sha256
from kvstore.codec.record import RecordFault
from kvstore.errors import ConfigError, RecordError
from kvstore.types import KEY_BYTES_MAX, BlockKey

AEAD_WIRE_ID: Final = 64
MAC_WIRE_ID: Final = 65

_NONCE_BYTES: Final = 12
_TAG_BYTES: Final = 16
_PADDING: Final = bytes(MAC_FIELD_BYTES - _NONCE_BYTES - _TAG_BYTES)
_NAMESPACE: Final = slice(32, 64)
_WRITER: Final = slice(96, 112)
"""Positions of the namespace's digest and the writer's id in a header, see ``docs/format.md``."""

_PURPOSES: Final = {AEAD_WIRE_ID: b"kvstore aead 1", MAC_WIRE_ID: b"kvstore mac 1"}
"""Each seal has its own keys: with a common key, a record of one seal could be presented as one of the other."""


def gcm(key: bytes, nonce: bytes) -> AEADEncryptionContext:
    """Begin an encryption or MAC by AES-256-GCM; no nonce may be used twice with a key."""
    return Cipher(algorithms.AES(key), modes.GCM(nonce)).encryptor()


class SealOptions(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Options of both seals."""

    keys: KeySource  # Source of the keyring.
    accept_unsealed: bool = False
    """Whether records without a seal are accepted. Only for a migration: while it is set, anyone with write access to
    the medium can forge records."""
    keyed_names: bool = False  # Whether the medium has keyed names instead of keys; requires ``names`` in the keyring.


class _GcmSeal(Seal):
    """Base of both seals, which differ only in writing. Each reads the records of both with the same keyring."""

    wire_ids: ClassVar[tuple[int, ...]]
    options_type: ClassVar[type[msgspec.Struct]] = SealOptions

    def __init__(self, options: Any, context: CodecContext) -> None:
        super().__init__(options, context)
        self.accepts_unsealed = options.accept_unsealed
        self._user_namespace = str(context.namespace.document()["fields"].get("user_namespace", ""))
        self._keyring = Keyring(options.keys)
        self.names = self._keyed_names() if options.keyed_names else None
        if not self._keyring.keys.has(self._keyring.keys.current, self._user_namespace):
            self._warn_of_missing_key(self._keyring.keys.current)

    @property
    def key_id(self) -> int:
        """The keyring's current key; raises RecordError (``RecordFault.CODEC``) if this tier has none."""
        keys = self._keyring.keys
        if not keys.has(keys.current, self._user_namespace):
            raise self._missing_key(keys.current)
        return keys.current

    def seal(self, key_id: int, associated: bytes, payload: memoryview, out: memoryview) -> bytes:
        """``out`` may be ``payload``."""
        nonce = os.urandom(_NONCE_BYTES)
        cipher = gcm(self._key(self.wire_id, key_id, associated), nonce)
        cipher.authenticate_additional_data(associated)
        if self.hides:
            cipher.update_into(payload, out)
        else:
            cipher.authenticate_additional_data(payload)
        cipher.finalize()
        return nonce + cipher.tag + _PADDING

    def open(
        self, wire_id: int, key_id: int, associated: bytes, mac: bytes, payload: memoryview, out: memoryview
    ) -> bool:
        """``out`` may be ``payload``."""
        nonce, tag, padding = mac[:_NONCE_BYTES], mac[_NONCE_BYTES : -len(_PADDING)], mac[-len(_PADDING) :]
        key = self._key(wire_id, key_id, associated)
        cipher = Cipher(algorithms.AES(key), modes.GCM(nonce, tag)).decryptor()
        hidden = wire_id == AEAD_WIRE_ID
        try:
            cipher.authenticate_additional_data(associated)
            if hidden:
                # The tag is verified afterwards, so callers must not use ``out`` before the return.
                cipher.update_into(payload, out)
            else:
                cipher.authenticate_additional_data(payload)
            cipher.finalize()
        except InvalidTag:
            padding = b"wrong"
        if padding != _PADDING:
            self._keyring.warn(
                "does not open a record that names it",
                key_id,
                "It counts as a miss. Either the record was forged, or this engine has another key of the same id "
                "than the writer: compare the keyrings.",
            )
            raise RecordError(
                f"Not the requested record: it was not sealed with our key {key_id}. It counts as a miss.",
                RecordFault.SEAL,
            )
        return hidden

    def _key(self, wire_id: int, key_id: int, associated: bytes) -> bytes:
        context = _PURPOSES[wire_id] + associated[_NAMESPACE] + associated[_WRITER]
        key = self._keyring.keys.derive(key_id, self._user_namespace, context)
        if key is None:
            raise self._missing_key(key_id)
        return key

    def _missing_key(self, key_id: int) -> RecordError:
        self._keyring.note_unknown()
        self._warn_of_missing_key(key_id)
        return RecordError(
            f"Not a record that this tier can open or seal: key {key_id} is not in its keyring, or has no salt for its "
            "namespace. It counts as a miss.",
            RecordFault.CODEC,
        )

    def _warn_of_missing_key(self, key_id: int) -> None:
        keys = self._keyring.keys
        if key_id not in keys.masters:
            self._keyring.warn_of_missing(
                "is not in the keyring", key_id, "Its records are misses. Add it, if they are wanted."
            )
        elif not keys.has(key_id, self._user_namespace):  # The key may have been added meanwhile.
            self._keyring.warn_of_missing(
                f"has no salt for the namespace {self._user_namespace!r}",
                key_id,
                "Its records are misses, and none are stored. Add a secret under 'salts', if it is to be served.",
            )

    def _keyed_names(self) -> KeyedNames:
        secret = self._keyring.keys.names
        if not secret:
            raise ConfigError(
                "'keyed_names' is true, and the keyring has no 'names'. Add 32 random bytes in base64 under it, and "
                "never change them: other bytes find no blocks."
            )
        return KeyedNames(hkdf_sha256(secret, b"", b"kvstore names 2" + self.context.namespace.digest))


class AeadSeal(_GcmSeal):
    """Encrypts and authenticates: without the key, records cannot be read, created, changed or swapped."""

    name = "aead"
    wire_ids = (AEAD_WIRE_ID, MAC_WIRE_ID)
    hides = True


class MacSeal(_GcmSeal):
    """Authenticates only (GMAC): without the key, records can be read, but not created, changed or swapped."""

    name = "mac"
    wire_ids = (MAC_WIRE_ID, AEAD_WIRE_ID)
    hides = False


class KeyedNames:
    """Names on media for keys of up to 48 bytes, so that a listing of names can't confirm a guessed prompt.

    A key is a hash over token ids, which anyone can compute for a guessed prompt. Its name is the key encrypted with
    AES-SIV (RFC 5297). AES-SIV is deterministic: equal keys have equal names, so holders of the secret (32 random
    bytes) can find and share blocks, and decrypt names. Threads may share it; a key takes microseconds.
    """

    def __init__(self, secret: bytes) -> None:
        self._cipher = AESSIV(secret)

    def name_of(self, key: BlockKey) -> BlockKey:
        """Return the name of a key; for a key that is too long, a name that matches no block."""
        # Truncated, because an exception here would lose other messages of the batch.
        return self._cipher.encrypt(key, None)[:KEY_BYTES_MAX]

    def key_of(self, name: BlockKey) -> BlockKey | None:
        """Return the key of a name; None if the name was made with another secret."""
        if len(name) <= _TAG_BYTES:
            return None
        try:
            return self._cipher.decrypt(name, None)
        except InvalidTag:
            return None
