"""Keyed names: equal for equal keys, and without information to readers who lack the secret."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from kvstore.codec.seal import KeyedNames
from kvstore.types import KEY_BYTES_MAX

NAMES = KeyedNames(b"s" * 32)


@given(st.binary(min_size=1, max_size=KEY_BYTES_MAX - 16))
def test_a_name_leads_back_to_its_key(key: bytes) -> None:
    """Names can be used wherever keys can, and a scan of a medium gives the original keys."""
    name = NAMES.name_of(key)
    assert len(name) == len(key) + 16
    assert NAMES.name_of(key) == name
    assert NAMES.key_of(name) == key


@given(st.binary(max_size=80))
def test_foreign_names_have_no_key(name: bytes) -> None:
    """Foreign names on the medium are distinguished from ours."""
    assert NAMES.key_of(name) is None


def test_name_of_an_empty_key_has_no_key() -> None:
    """No block has an empty key, so no name gives one."""
    assert NAMES.key_of(NAMES.name_of(b"")) is None


def test_overlong_key_gets_an_opaque_name() -> None:
    """Such a key gets a name that can be looked up and does not reveal the key; no block has it."""
    for size in (KEY_BYTES_MAX - 15, KEY_BYTES_MAX, 129, 1000):
        name = NAMES.name_of(b"k" * size)
        assert 0 < len(name) <= KEY_BYTES_MAX and b"kk" not in name
        assert NAMES.key_of(name) is None


def test_another_secret_gives_other_names() -> None:
    """Without the secret a key's name cannot be predicted, even for keys that differ in one bit only."""
    rng = random.Random(7)
    other = KeyedNames(b"t" * 32)
    for _ in range(200):
        key = rng.randbytes(36)
        near = bytes([key[0] ^ 1]) + key[1:]
        far = key[:-1] + bytes([key[-1] ^ 0x80])
        names = [NAMES.name_of(key), NAMES.name_of(near), NAMES.name_of(far), other.name_of(key)]
        assert other.key_of(names[0]) is None
        # Of 52 random bytes, about one in five pairs has an equal byte at one place; eight equal ones are a pattern.
        for i, one in enumerate(names):
            assert all(sum(a == b for a, b in zip(one, two, strict=True)) < 8 for two in names[i + 1 :])


def test_names_are_the_same_in_every_release() -> None:
    """Names are the same in every release; otherwise all stored blocks would be lost."""
    assert (
        NAMES.name_of(bytes(range(36))).hex()
        == "f16d1a9f8d0a1cf95878a05321bdb07ef9139c27bd82e1dbe1372d13bffb13d3afd988b8e09fefb48ebe24f2e90d6d6d91171b59"
    )
