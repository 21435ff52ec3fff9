"""Keyed names: what media see instead of keys, so that nobody who lists them can confirm a prompt.

A key is a hash over token ids, which anybody can compute for a prompt that they suspect. Its keyed name is a
permutation of all keys of the same length that only the holders of a secret can compute, in both directions: a Feistel
network of four rounds over keyed BLAKE2b (M. Luby, C. Rackoff, "How to construct pseudorandom permutations from
pseudorandom functions", 1988; four rounds stand against who may ask for both directions).
"""

from __future__ import annotations

import hashlib
from typing import Final

from kvstore.types import KEY_BYTES_MAX, BlockKey

__all__ = ["KeyedNames"]

_ROUNDS: Final = tuple(b"kvstore name %d" % number for number in range(4))
"""Personalisation of the hash in each round, which makes four functions of one secret."""
_NO_KEY: Final = b"kvstore no key"


class KeyedNames:
    """Maps keys to names of the same length, and back. Threads may share it; microseconds a key.

    Equal keys have equal names, so blocks are found and shared as before among those who have the secret. Keys of
    fewer than 16 bytes are mapped too, but there are so few of them that watching which names appear may tell them.

    Args:
        secret: 16 to 64 random bytes.
    """

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def name_of(self, key: BlockKey) -> BlockKey:
        """Return the name of a key; of what is too long for one, a name that no block has."""
        if len(key) > KEY_BYTES_MAX:
            # A caller's defect, and an error here would lose the messages beside it.
            return hashlib.blake2b(key, key=self._secret, person=_NO_KEY).digest()
        half = len(key) // 2
        left, right = key[:half], key[half:]
        for person in _ROUNDS:
            left, right = right, self._mixed(left, right, person)
        return left + right

    def key_of(self, name: BlockKey) -> BlockKey:
        """Return the key that has a name; of what is no name of ours, some bytes."""
        if len(name) > KEY_BYTES_MAX:
            return name
        half = len(name) // 2
        left, right = name[:half], name[half:]
        for person in reversed(_ROUNDS):
            left, right = self._mixed(right, left, person), left
        return left + right

    def _mixed(self, half: bytes, by: bytes, person: bytes) -> bytes:
        """Return ``half`` with what the round's function makes of ``by`` added (exclusive or)."""
        if not half:
            return half  # Of a key of one byte one half is empty, and the hash has no digest of zero bytes.
        mask = hashlib.blake2b(by, digest_size=len(half), key=self._secret, person=person).digest()
        return (int.from_bytes(half) ^ int.from_bytes(mask)).to_bytes(len(half))
