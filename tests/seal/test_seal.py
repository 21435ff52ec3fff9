"""Seals alone: the data they bind, the keys they accept, and their errors without a key."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from kvstore.codec.coding import Decoder
from kvstore.codec.keyring import Keys
from kvstore.codec.record import RecordCodec, RecordFault, decode_header
from kvstore.codec.seal import AeadSeal, MacSeal
from kvstore.errors import ConfigError, RecordError
from kvstore.namespace import Namespace
from kvstore.tiers.codecs import TierCodecs
from tests.seal.keyrings import NAMESPACE, document, header, make_seal, secret, soon, write

Kind = type[AeadSeal] | type[MacSeal]
KINDS: list[Kind] = [AeadSeal, MacSeal]
SIZES = [0, 1, 15, 16, 17, 4096, 70_001, 2 << 20]


def keys_of(seal: AeadSeal | MacSeal) -> Keys:
    """Return the keys of a seal."""
    return seal._keyring.keys


def derived_count(seal: AeadSeal | MacSeal) -> int:
    """Return the number of derived keys that a seal holds in memory."""
    return len(keys_of(seal)._derived)


def sealed(seal: AeadSeal | MacSeal, associated: bytes, plain: bytes, key_id: int = 1) -> tuple[bytes, bytes]:
    """Return MAC field and stored payload."""
    out = bytearray(len(plain) if seal.hides else 0)
    mac = seal.seal(key_id, associated, memoryview(plain), memoryview(out))
    return mac, bytes(out) if seal.hides else plain


def opened(
    seal: AeadSeal | MacSeal, wire_id: int, associated: bytes, mac: bytes, stored: bytes, key_id: int = 1
) -> bytes:
    """Return the plain payload; raises RecordError."""
    out = bytearray(len(stored))
    hidden = seal.open(wire_id, key_id, associated, mac, memoryview(stored), memoryview(out))
    assert hidden == (wire_id == AeadSeal.wire_ids[0])
    return bytes(out) if hidden else stored


def refused(
    seal: AeadSeal | MacSeal, wire_id: int, associated: bytes, mac: bytes, stored: bytes, key_id: int = 1
) -> str:
    """Return the fault for which a record is refused."""
    with pytest.raises(RecordError) as caught:
        opened(seal, wire_id, associated, mac, stored, key_id)
    return caught.value.cause


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_sealed_payloads_of_each_length_are_restored(tmp_path: Path, kind: Kind, size: int) -> None:
    """Each length is restored by either seal over the same keyring; aead hides the payload and mac does not."""
    path = write(tmp_path / "keys", document(1))
    plain = bytes(range(256)) * (size // 256 + 1)
    plain = plain[:size]
    seal = make_seal(path, kind)
    mac, stored = sealed(seal, header(1), plain)
    assert len(mac) == 32 and len(stored) == size
    assert (stored == plain) == (not seal.hides or not plain)
    for reader in (make_seal(path, AeadSeal), make_seal(path, MacSeal)):
        assert opened(reader, seal.wire_id, header(1), mac, stored) == plain


def test_it_works_in_place(tmp_path: Path) -> None:
    """Sealing and opening may write to their source, so that no second buffer is needed."""
    seal = make_seal(write(tmp_path / "keys", document(1)))
    plain = bytes(range(256)) * 300
    buffer = memoryview(bytearray(plain))
    mac = seal.seal(1, header(1), buffer, buffer)
    assert buffer != plain
    assert seal.open(seal.wire_id, 1, header(1), mac, buffer, buffer)
    assert buffer == plain


def test_keys_of_both_uses_are_cached_apart(tmp_path: Path) -> None:
    """A seal opens records of both kinds by one writer, in either order, without confusing the two keys."""
    path = write(tmp_path / "keys", document(1))
    # The keyring is read once, as each read empties the cache.
    aead, mac = (make_seal(path, kind, refresh=3600) for kind in KINDS)
    records = [
        (kind.wire_ids[0], *sealed(seal, header(1), b"x" * 100)) for kind, seal in ((AeadSeal, aead), (MacSeal, mac))
    ]
    for wire_id, field, stored in (*records, *reversed(records)):
        assert opened(aead, wire_id, header(1), field, stored) == b"x" * 100
    assert derived_count(aead) == 2


@pytest.mark.parametrize(("missing", "is_refused"), [(0, False), (1, True)])
def test_a_sealed_payload_shorter_than_its_block_is_refused(tmp_path: Path, missing: int, is_refused: bool) -> None:
    """Without a codec a payload is its block: opened in a slot, a shorter one leaves another block's bytes there."""
    buffer, payload = memoryview(bytearray(256)), memoryview(bytes(1000))
    RecordCodec(NAMESPACE, header_bytes=256).encode_header(buffer, b"key", payload)
    plain = decode_header(buffer)
    found = plain._replace(
        codec_chain=AeadSeal.wire_ids[0], mac_key_id=1, plain_bytes=1000, stored_bytes=1000 - missing
    )
    seal = make_seal(write(tmp_path / "keys", document(1)))
    assert bool(Decoder(lambda wire_id: None, seal).refusal(found)) == is_refused


@pytest.mark.parametrize("kind", KINDS)
def test_equal_blocks_are_sealed_differently(tmp_path: Path, kind: Kind) -> None:
    """Two records of the same block share neither nonce nor tag, nor, with aead, the payload."""
    seal = make_seal(write(tmp_path / "keys", document(1)), kind)
    first, second = sealed(seal, header(1), bytes(64)), sealed(seal, header(1), bytes(64))
    assert first[0][:12] != second[0][:12] and first[0][12:28] != second[0][12:28]
    assert not seal.hides or first[1] != second[1]


@pytest.mark.parametrize("kind", KINDS)
def test_writers_namespaces_salts_and_uses_have_keys_of_their_own(tmp_path: Path, kind: Kind) -> None:
    """A tag is invalid under another writer, namespace or salt, and for the other seal."""
    path = write(tmp_path / "keys", document(1, salts={"a": secret(10), "b": secret(11)}))
    ours = Namespace({"user_namespace": "a"})
    seal = make_seal(path, kind, namespace=ours)
    mac, stored = sealed(seal, header(1, namespace=ours), b"block" * 9)
    assert opened(seal, seal.wire_id, header(1, namespace=ours), mac, stored) == b"block" * 9
    other_wire_id = seal.wire_ids[1]
    theirs = Namespace({"user_namespace": "b"})
    assert refused(seal, other_wire_id, header(1, namespace=ours), mac, stored) == RecordFault.SEAL
    assert refused(seal, seal.wire_id, header(1, namespace=ours, writer=bytes(16)), mac, stored) == RecordFault.SEAL
    assert refused(seal, seal.wire_id, header(1, namespace=theirs), mac, stored) == RecordFault.SEAL
    # Another one with the same master key, and even our namespace's digest in its header.
    other = make_seal(path, kind, namespace=theirs)
    assert refused(other, seal.wire_id, header(1, namespace=ours), mac, stored) == RecordFault.SEAL


def test_the_key_that_is_written_with_follows_the_keyring(tmp_path: Path) -> None:
    """After a rotation new records name the new key; records of the old key can be opened while it is kept."""
    path = write(tmp_path / "keys", document(1))
    seal = make_seal(path)
    assert seal.key_id == 1
    old = sealed(seal, header(1), b"old")
    write(path, document(1, 2))
    soon(lambda: seal.key_id == 2, what="the new key")
    new = sealed(seal, header(2), b"new", 2)
    assert opened(seal, seal.wire_id, header(1), *old) == b"old"
    assert opened(seal, seal.wire_id, header(2), *new, 2) == b"new"
    write(path, document(2))
    soon(lambda: 1 not in keys_of(seal).masters, what="the end of the old key")
    assert refused(seal, seal.wire_id, header(1), *old) == RecordFault.CODEC
    assert opened(seal, seal.wire_id, header(2), *new, 2) == b"new"


def test_first_record_with_a_new_key_reloads_the_keyring(tmp_path: Path) -> None:
    """A record of a key added after the last read is a miss once, and can soon be opened, long before refresh."""
    path = write(tmp_path / "keys", document(1))
    reader = make_seal(path, refresh=3600)
    write(path, document(1, 2))
    mac, stored = sealed(make_seal(path), header(2), b"block", 2)

    def opens() -> bool:
        try:
            return opened(reader, reader.wire_id, header(2), mac, stored, 2) == b"block"
        except RecordError:
            return False

    assert not opens()
    soon(opens, what="the new key")


def test_keyed_names_need_their_secret_and_keep_it_through_rotations(tmp_path: Path) -> None:
    """Names do not change with keys, differ between namespaces, and need a secret for the tier to open."""
    path = write(tmp_path / "keys", document(1, names=secret(20)))
    key = bytes(range(36))
    first = make_seal(path, keyed_names=True).names
    write(path, document(2, 3, names=secret(20)))
    second = make_seal(path, MacSeal, keyed_names=True).names
    other = make_seal(path, keyed_names=True, namespace=Namespace({"other": 1})).names
    assert first is not None and second is not None and other is not None
    assert first.name_of(key) == second.name_of(key) != other.name_of(key)
    assert make_seal(path).names is None
    with pytest.raises(ConfigError, match="'names'"):
        make_seal(write(path, document(1)), keyed_names=True)


def test_threads_may_share_a_seal_while_its_keys_change(tmp_path: Path) -> None:
    """Many threads seal and open during rotations: each record is opened correctly, or its key was dropped."""
    path = write(tmp_path / "keys", document(1, 2))
    seal = make_seal(path)
    problems: list[str] = []
    opened_count = [0] * 4
    ended = threading.Event()

    def work(number: int) -> None:
        turn = 0
        while not ended.is_set():
            turn += 1
            plain = b"%d %d" % (number, turn)
            try:
                key_id = seal.key_id
                # More writers than the cache of derived keys holds.
                associated = header(key_id, writer=(turn % 1500).to_bytes(16))
                mac, stored = sealed(seal, associated, plain, key_id)
                if opened(seal, 64, associated, mac, stored, key_id) != plain:
                    problems.append(f"wrong bytes at {number}, {turn}")
                opened_count[number] += 1
            except RecordError as error:
                if error.cause != RecordFault.CODEC:
                    problems.append(str(error))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        for turn in range(3, 40):
            write(path, document(turn - 1, turn))
            soon(lambda turn=turn: turn in keys_of(seal).masters, what="a reading")
        soon(lambda: min(opened_count), what="a block that was opened, on each thread")
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert not problems, problems[:3]
    assert derived_count(seal) <= 1024


@pytest.mark.parametrize(
    "codec",
    [
        f"aead:{secret(7)}",
        f"zstd+mac:{secret(7)}",
        [{"aead": secret(7)}],
        [{"aead": {"keys": secret(7)}}],
        [{"aead": {"keys": {"env": secret(7)}}}],
        [{"aead": {"keys": {"env": json.dumps(document(7))}}}],
    ],
    ids=range(6),
)
def test_a_key_in_the_wrong_place_is_not_shown(codec: Any) -> None:
    """A key, or the keyring, in place of its location appears in no error or log."""
    with pytest.raises(ConfigError, match="not shown") as caught:
        TierCodecs(codec, NAMESPACE)
    assert secret(7)[:8] not in str(caught.value)


@pytest.mark.parametrize("order", [["mac", "zstd"], ["aead", "mac"], ["zstd", "mac", "aead"]], ids=str)
def test_a_seal_is_one_and_the_last_step(tmp_path: Path, order: list[str]) -> None:
    """A step after a seal would change authenticated bytes."""
    keys = {"file": str(write(tmp_path / "keys", document(1)))}
    codec = [{name: {"keys": keys}} if name in ("aead", "mac") else name for name in order]
    with pytest.raises(ConfigError, match="at most one of 'aead' and 'mac', as its last step"):
        TierCodecs(codec, NAMESPACE)
