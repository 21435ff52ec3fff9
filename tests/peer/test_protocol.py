"""The frames of the peer protocol: golden bytes, their documentation, and invalid frames."""

from __future__ import annotations

import hashlib
import random
import re
from pathlib import Path

import pytest

from kvstore.backends.peer import protocol
from kvstore.backends.peer.protocol import Greeting, Op, Part, PeerProtocolError

GOLDEN = Path(__file__).with_name("golden")
PAGE = Path(__file__).parents[2] / "docs" / "peer.md"
SECRET = b"a secret of sixteen"
CLIENT_NONCE, SERVER_NONCE, NAMESPACE = bytes(range(32)), bytes(range(32, 64)), bytes(range(64, 96))
KEYS = [b"k", bytes(range(32)), bytes(range(64))]
HELLO = protocol.pack_greeting(Greeting(CLIENT_NONCE, NAMESPACE))

FRAMES = {
    "hello": HELLO,
    "welcome": protocol.pack_greeting(
        Greeting(SERVER_NONCE, protocol.server_proof(SECRET, HELLO, SERVER_NONCE)),
    ),
    "foreign": protocol.pack_greeting(
        Greeting(SERVER_NONCE, protocol.server_proof(SECRET, HELLO, SERVER_NONCE), is_foreign=True),
    ),
    "proof": protocol.client_proof(SECRET, HELLO, SERVER_NONCE),
    "lookup": protocol.pack_question(Op.LOOKUP, KEYS),
    "hand-overs": protocol.pack_question(Op.HAND_OVERS, [bytes(range(32))]),
    "load": protocol.pack_question(Op.LOAD, KEYS),
    "record": protocol.pack_part(Part.RECORD, 256 + 65536),
    "absent": protocol.pack_part(Part.ABSENT),
    "memory": protocol.pack_question(Op.MEMORY, [protocol.NIXL]),
    "metadata": protocol.pack_metadata(b"what NIXL says"),
    "lend": protocol.pack_question(Op.LEND, KEYS),
    "lent": protocol.pack_part(Part.LENT, 256 + 65536) + protocol.pack_address(0x7F00_1234_5678_9ABC),
    "returned": protocol.RETURNED,
}

SHA256 = {
    "v1-absent.bin": "7c9fa136d4413fa6173637e883b6998d32e1d675f88cddff9dcbcf331820f4b8",
    "v1-foreign.bin": "50c5d3b37ad0e33136707411986e716ea2e331928ebe4f1a09094e860a706899",
    "v1-hello.bin": "d8f44ed1e360cd314792a2e34f49ff1164c8168a2d4804097456109cce4fedf6",
    "v1-load.bin": "d9dd7024f91906ddf9329280335440731a0dfce9e6acd29b979cc87cfac36f4c",
    "v1-lookup.bin": "b4e39461af2903a33969d7e1fef7a9a3f5d4b68d6d0319fc691efa1975105069",
    "v1-proof.bin": "830aa61bf50ff5045b01484664dc48a20124e1b95e42d459bfdb676833f27939",
    "v1-record.bin": "f498e6ee3461976853873463956484bcb162a8f8799ac221f213d134d34316d0",
    "v1-welcome.bin": "92c07deda8aed17d8d035e19d0595bdaf8c5abec27dbdb208691053cb5164ed9",
    "v2-absent.bin": "7c9fa136d4413fa6173637e883b6998d32e1d675f88cddff9dcbcf331820f4b8",
    "v2-foreign.bin": "0c8601f76fd3a98619379509f1430b75a266fae3263a99cfa5d9536edf7ae3e6",
    "v2-hand-overs.bin": "1eece0f61b40be33974efe145101aa43b7939606381cbff2ccb550e0e8da5d55",
    "v2-hello.bin": "a02fc5eb485667a7986fcac92bc916b73ea5c19cc6ba33f5a8fd69022defcd8d",
    "v2-lend.bin": "f29bd2607b8851da3f701b0835e48c9be7a09d4e8746eb932d0be2fe15028c79",
    "v2-lent.bin": "051492141ebd3fbd4be8015f871919c975391cbbafcf8aa847a4e2d6e0bb769c",
    "v2-load.bin": "d9dd7024f91906ddf9329280335440731a0dfce9e6acd29b979cc87cfac36f4c",
    "v2-lookup.bin": "b4e39461af2903a33969d7e1fef7a9a3f5d4b68d6d0319fc691efa1975105069",
    "v2-memory.bin": "0598a299dcd15c70c292d2e336936e1506765d6e3b5a81f63c6180d18af6a4bc",
    "v2-metadata.bin": "195eff16b39dd0261d0ab632122c73596161706bf5cefe3974904f08940b73fe",
    "v2-proof.bin": "d06c62ecbb1285f88f151d0ee9e63237d9e4a97323b7416ea96c0fd044dc756b",
    "v2-record.bin": "f498e6ee3461976853873463956484bcb162a8f8799ac221f213d134d34316d0",
    "v2-returned.bin": "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "v2-welcome.bin": "77e410fa611aab46bbdd5ff5b86d72dec267d6926410a1cd4c635f4c8fa7d3d6",
}
"""Digests of all golden files ever made, so that a replacement is detected."""

ROW = re.compile(r"^\| (\d+) \| (\d+) \| \w+ \| `(\w+)` \|", re.MULTILINE)


@pytest.mark.parametrize("name", sorted(SHA256))
def test_golden_files_never_change(name: str) -> None:
    """Every file is the one made with its version."""
    assert hashlib.sha256((GOLDEN / name).read_bytes()).hexdigest() == SHA256[name]


@pytest.mark.parametrize("name", FRAMES)
def test_frames_are_the_golden_ones(name: str) -> None:
    """Current code produces the same bytes that this version always produced; other bytes need another version."""
    assert FRAMES[name] == (GOLDEN / f"v{protocol.VERSION}-{name}.bin").read_bytes()


def test_golden_frames_are_read() -> None:
    """The golden frames decode to their original content, and both proofs are checked."""
    hello = (GOLDEN / "v2-hello.bin").read_bytes()
    assert protocol.read_greeting(hello) == Greeting(CLIENT_NONCE, NAMESPACE)
    welcome = protocol.read_greeting((GOLDEN / "v2-welcome.bin").read_bytes())
    assert welcome.nonce == SERVER_NONCE
    assert welcome.content == protocol.server_proof(SECRET, hello, SERVER_NONCE)
    assert welcome.content != protocol.client_proof(SECRET, hello, SERVER_NONCE)
    foreign = protocol.read_greeting((GOLDEN / "v2-foreign.bin").read_bytes())
    assert (welcome.is_foreign, foreign.is_foreign) == (False, True)
    for name, op, names in (
        ("lookup", Op.LOOKUP, KEYS),
        ("load", Op.LOAD, KEYS),
        ("hand-overs", Op.HAND_OVERS, [bytes(range(32))]),
        ("memory", Op.MEMORY, [b"nixl"]),
        ("lend", Op.LEND, KEYS),
    ):
        data = (GOLDEN / f"v2-{name}.bin").read_bytes()
        head, body = data[: protocol.QUESTION_BYTES], data[protocol.QUESTION_BYTES :]
        question = protocol.read_question(head)
        assert (question.op, question.count, question.body_bytes) == (op, len(names), len(body))
        assert protocol.read_keys(body, question.count) == names
    assert protocol.read_part((GOLDEN / "v2-record.bin").read_bytes()) == (Part.RECORD, 256 + 65536)
    assert protocol.read_part((GOLDEN / "v2-absent.bin").read_bytes()) == (Part.ABSENT, 0)
    lent = (GOLDEN / "v2-lent.bin").read_bytes()
    assert protocol.read_part(lent[: protocol.PART_BYTES]) == (Part.LENT, 256 + 65536)
    assert protocol.read_address(lent[protocol.PART_BYTES :]) == 0x7F00_1234_5678_9ABC
    metadata = (GOLDEN / "v2-metadata.bin").read_bytes()
    assert protocol.read_length(metadata[: protocol.LENGTH_BYTES]) == len(metadata) - protocol.LENGTH_BYTES


def test_earlier_versions_are_refused() -> None:
    """The greetings of version 1 are recognised, and no other frame of it is."""
    for name in ("hello", "welcome", "foreign"):
        with pytest.raises(PeerProtocolError, match=r"it speaks version 1 .*, expected 2"):
            protocol.read_greeting((GOLDEN / f"v1-{name}.bin").read_bytes())


def test_the_page_covers_the_frames() -> None:
    """The tables of docs/peer.md cover each frame without a gap, and name its length."""
    tables = {
        heading: body
        for heading, body in re.findall(r"^### `(\w+)`.*?\n(.*?)(?=^##|\Z)", PAGE.read_text(), re.M | re.S)
    }
    for name, frame in (("hello", 80), ("welcome", 80), ("question", 8), ("part", 8)):
        end = 0
        for offset, size, field in ROW.findall(tables[name]):
            assert int(offset) == end, f"{name}: {field} starts at {offset}, the one before it ends at {end}"
            end += int(size)
        assert end == frame, f"{name}: the table ends at {end}"
    assert len(HELLO) == protocol.GREETING_BYTES == 80
    assert protocol.QUESTION_BYTES == protocol.PART_BYTES == 8


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1" + bytes(72),
        HELLO[:8] + b"\3\0" + HELLO[10:],
        HELLO[:10] + b"\1\0" + HELLO[12:],
    ],
    ids=["other magic", "other version", "unknown flag"],
)
def test_what_is_no_greeting(data: bytes) -> None:
    """An unknown greeting is refused by both sides."""
    with pytest.raises(PeerProtocolError):
        protocol.read_greeting(data)


@pytest.mark.parametrize(
    ("op", "reserved", "count", "body_bytes"),
    [(0, 0, 1, 2), (6, 0, 1, 2), (1, 1, 1, 2), (1, 0, 0, 0), (1, 0, 4097, 9000), (2, 0, 2, 3), (2, 0, 2, 131)],
)
def test_what_is_no_question(op: int, reserved: int, count: int, body_bytes: int) -> None:
    """An unknown kind, an invalid number of keys, or an impossible length is refused before the body is received."""
    data = protocol._QUESTION.pack(op, reserved, count, body_bytes)
    with pytest.raises(PeerProtocolError):
        protocol.read_question(data)


def test_bodies_that_are_not_their_keys() -> None:
    """Any change of a body's structure is refused; a change within a key gives another key."""
    body = protocol.pack_question(Op.LOAD, KEYS)[protocol.QUESTION_BYTES :]
    for broken in (body[:-1], body + b"\0", b"\0" + body[1:], b"\x41" + body[1:], b"\xff" * len(body), b""):
        with pytest.raises(PeerProtocolError):
            protocol.read_keys(broken, len(KEYS))
    rng = random.Random(1)
    for _ in range(2000):
        count = rng.randrange(1, 5)
        data = rng.randbytes(rng.randrange(2 * count, 65 * count + 1))
        try:
            keys = protocol.read_keys(data, count)
        except PeerProtocolError:
            continue
        assert b"".join(bytes([len(key)]) + key for key in keys) == data


@pytest.mark.parametrize("data", [b"\3\0\0\0\0\0\0\0", b"\xff" * 8, b"\1\0\0\0\1\0\0\0"])
def test_what_is_no_part(data: bytes) -> None:
    """An unknown part, and an absent block with a length, are refused."""
    with pytest.raises(PeerProtocolError):
        protocol.read_part(data)


def test_metadata_is_bounded() -> None:
    """A length above the limit is refused before any of the metadata is received."""
    most = protocol.METADATA_MAX
    assert protocol.read_length(most.to_bytes(4, "little")) == most
    with pytest.raises(PeerProtocolError, match="65537 bytes of metadata"):
        protocol.read_length((most + 1).to_bytes(4, "little"))
