"""Keyed names: a permutation that needs the secret."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from kvstore.codec.names import KeyedNames
from kvstore.types import KEY_BYTES_MAX

NAMES = KeyedNames(b"s" * 32)


@given(st.binary(min_size=1, max_size=KEY_BYTES_MAX))
def test_a_name_has_the_length_of_its_key_and_leads_back(key: bytes) -> None:
    """Names can be used wherever keys can, and a scan of a medium gives the keys again."""
    name = NAMES.name_of(key)
    assert len(name) == len(key)
    assert NAMES.key_of(name) == key
    assert NAMES.name_of(NAMES.key_of(key)) == key


def test_all_keys_of_two_bytes_have_a_name_of_their_own() -> None:
    """It is a permutation: no two keys share a name."""
    keys = [number.to_bytes(2) for number in range(1 << 16)]
    assert {NAMES.name_of(key) for key in keys} == set(keys)


def test_what_is_too_long_for_a_key_is_no_error() -> None:
    """It gets a name that can be asked for and that tells nothing of it; nobody has a block of it."""
    for size in (KEY_BYTES_MAX + 1, 129, 1000):
        name = NAMES.name_of(b"k" * size)
        assert 0 < len(name) <= KEY_BYTES_MAX and b"kk" not in name
        assert NAMES.key_of(b"k" * size) == b"k" * size


def test_another_secret_gives_other_names() -> None:
    """Who has another secret, or none, can't tell the name of a key, also where keys differ in one bit only."""
    rng = random.Random(7)
    other = KeyedNames(b"t" * 32)
    for _ in range(200):
        key = rng.randbytes(36)
        near = bytes([key[0] ^ 1]) + key[1:]
        far = key[:-1] + bytes([key[-1] ^ 0x80])
        names = [NAMES.name_of(key), NAMES.name_of(near), NAMES.name_of(far), other.name_of(key), key]
        # Of 36 random bytes, about one in seven pairs has an equal byte at some place; eight equal ones are a pattern.
        for i, one in enumerate(names):
            assert all(sum(a == b for a, b in zip(one, two, strict=True)) < 8 for two in names[i + 1 :])


def test_names_stay_as_they_are() -> None:
    """The names of one release are those of the next, or everything stored is lost."""
    assert (
        NAMES.name_of(bytes(range(36))).hex()
        == "dce5a248ddb6765d74e277fde7ee21937fdf00d9330165d6a0c85a467f95532e511992f3"
    )
    assert NAMES.name_of(bytes(range(33))).hex() == "76a34154bef1baa800b49da4eb3668f24ef11b6a037799ffc83ed19d7a722600b5"
