"""The frames of the peer protocol: golden bytes, their documentation, and invalid frames."""

from __future__ import annotations

import hashlib
import random
import re
from pathlib import Path

import pytest

from kvstore.backends.peer import protocol
from kvstore.backends.peer.protocol import Agreement, FrameMac, Hello, Note, Op, Part, PeerProtocolError, Welcome

GOLDEN = Path(__file__).with_name("golden")
PAGE = Path(__file__).parents[2] / "docs" / "peer.md"
SECRET = b"a secret of sixteen"
CLIENT_NONCE, SERVER_NONCE, NAMESPACE = bytes(range(32)), bytes(range(32, 64)), bytes(range(64, 96))
KEYS = [b"k", bytes(range(32)), bytes(range(64))]
DIALLED = protocol.address_of("10.0.0.2", 5710)
HELLO = protocol.pack_hello(Hello(CLIENT_NONCE, NAMESPACE, DIALLED))


def welcome(*noted: Note) -> bytes:
    """Return a welcome with its proof."""
    notes = Note(sum(noted))
    draft = protocol.pack_welcome(Welcome(SERVER_NONCE, notes))
    return protocol.pack_welcome(Welcome(SERVER_NONCE, notes, Agreement(SECRET, HELLO, draft, b"").server_proof))


AGREEMENT = Agreement(SECRET, HELLO, welcome(), b"")


def sealed(mac: FrameMac, *frames: bytes) -> bytes:
    """Return frames with their MACs."""
    data = b""
    for frame in frames:
        mac.update(frame)
        data += frame + mac.end()
    return data


QUESTIONS = {
    "lookup": protocol.pack_question(Op.LOOKUP, KEYS),
    "hand-overs": protocol.pack_question(Op.HAND_OVERS, [bytes(range(32))]),
    "load": protocol.pack_question(Op.LOAD, KEYS),
}
FRAMES = {
    "hello": HELLO,
    "welcome": welcome(),
    "foreign": welcome(Note.FOREIGN),
    "misdirected": welcome(Note.MISDIRECTED),
    "proof": AGREEMENT.client_proof,
    "questions": sealed(AGREEMENT.questions(), *QUESTIONS.values()),
    "answers": sealed(
        AGREEMENT.answers(),
        b"\0\1\2",
        b"\2",
        protocol.pack_part(Part.ABSENT, 2),
        protocol.pack_part(Part.RECORD, 300) + bytes(300),
    ),
}

SHA256 = {
    "v3-answers.bin": "b831e8e9c65ec4870f8074319d9bb1d895d68b2b6d3a25d47318a0c7eae8f0d2",
    "v3-foreign.bin": "5775ec90614665a4eeffd18004bc94daf88f1e0bb2d22a6d8db74d0617935097",
    "v3-hello.bin": "386d435c4a4331b49b0433e80f9fd256815b8cb2acc9e11238b103ca717daa1f",
    "v3-misdirected.bin": "dfa3c38895e998abe921ebdb9db5c02bc5253a05a390fddcbc746733bda06963",
    "v3-proof.bin": "732a98130c8414d71b81427fa85db7c29a9e077801a3a446b36e380906ff33bc",
    "v3-questions.bin": "cc8c61b19a96a2a46afaddf00e17ff1349cc832ecf3a4b06583cc042d8ceafef",
    "v3-welcome.bin": "2700e629ee0ea45183a559bbf45faac49fd181c453dfee248312d270579e527f",
}
"""Digests of all golden files of this version, so that a replacement is detected."""

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
    """The golden frames decode to their original content."""
    hello = (GOLDEN / "v3-hello.bin").read_bytes()
    protocol.check_head(hello[: protocol.HEAD_BYTES])
    assert protocol.read_hello(hello) == Hello(CLIENT_NONCE, NAMESPACE, DIALLED)
    for name, notes in (("welcome", Note(0)), ("foreign", Note.FOREIGN), ("misdirected", Note.MISDIRECTED)):
        data = (GOLDEN / f"v3-{name}.bin").read_bytes()
        agreement = Agreement(SECRET, hello, data, b"")
        assert protocol.read_welcome(data) == Welcome(SERVER_NONCE, notes, agreement.server_proof)
        assert agreement.server_proof != agreement.client_proof
    data, mac = (GOLDEN / "v3-questions.bin").read_bytes(), AGREEMENT.questions()
    for op, names in ((Op.LOOKUP, KEYS), (Op.HAND_OVERS, [bytes(range(32))]), (Op.LOAD, KEYS)):
        question = protocol.read_question(data[: protocol.QUESTION_BYTES])
        end = protocol.QUESTION_BYTES + question.body_bytes
        assert (question.op, question.count) == (op, len(names))
        assert protocol.read_keys(data[protocol.QUESTION_BYTES : end], question.count) == names
        mac.update(data[:end])
        assert data[end : end + mac.tag_bytes] == mac.end()
        data = data[end + mac.tag_bytes :]
    assert data == b""


def test_every_byte_of_a_greeting_changes_its_proofs_and_keys() -> None:
    """Proofs and keys depend on each byte of the hello and the welcome, on the secret, and on the TLS connection."""

    def derived(agreement: Agreement) -> set[bytes]:
        return {agreement.server_proof, agreement.client_proof, agreement.questions().end(), agreement.answers().end()}

    head, seen = welcome()[: -protocol.PROOF_BYTES], derived(AGREEMENT)
    assert len(seen) == 4
    changed = [
        Agreement(SECRET, data[: len(HELLO)], data[len(HELLO) :] + bytes(protocol.PROOF_BYTES), b"")
        for place in range(len(HELLO + head))
        for data in [bytes(byte ^ (at == place) for at, byte in enumerate(HELLO + head))]
    ]
    for agreement in (*changed, Agreement(b"another", HELLO, welcome(), b"")):
        assert not derived(agreement) & seen
    bound = Agreement(SECRET, HELLO, welcome(), b"tls")
    assert not {bound.server_proof, bound.client_proof} & seen
    assert bound.answers().tag_bytes == 0, "TLS authenticates frames"


@pytest.mark.parametrize("version", [1, 2, 4])
def test_other_versions_are_refused(version: int) -> None:
    """A greeting of another version is refused with both versions in the error."""
    head = HELLO[:8] + bytes([version]) + HELLO[9 : protocol.HEAD_BYTES]
    with pytest.raises(PeerProtocolError, match=rf"it speaks version {version} .*, expected 3"):
        protocol.check_head(head)


def test_the_page_covers_the_frames() -> None:
    """The tables of docs/peer.md cover each frame without a gap, and name its length."""
    tables = {
        heading: body
        for heading, body in re.findall(r"^### `(\w+)`.*?\n(.*?)(?=^##|\Z)", PAGE.read_text(), re.M | re.S)
    }
    for name, frame in (("hello", 98), ("welcome", 80), ("question", 8), ("part", 8)):
        end = 0
        for offset, size, field in ROW.findall(tables[name]):
            assert int(offset) == end, f"{name}: {field} starts at {offset}, the one before it ends at {end}"
            end += int(size)
        assert end == frame, f"{name}: the table ends at {end}"
    assert (protocol.HELLO_BYTES, protocol.WELCOME_BYTES) == (98, 80)
    assert protocol.QUESTION_BYTES == protocol.PART_BYTES == 8


@pytest.mark.parametrize("data", [b"HTTP/1.1" + bytes(8), HELLO[:10] + b"\1\0" + bytes(4)])
def test_invalid_greetings_are_refused(data: bytes) -> None:
    """Another magic and an unknown flag are refused."""
    with pytest.raises(PeerProtocolError):
        protocol.check_head(data)


@pytest.mark.parametrize(
    ("op", "reserved", "count", "body_bytes"),
    [(0, 0, 1, 2), (4, 0, 1, 2), (1, 1, 1, 2), (1, 0, 0, 0), (1, 0, 4097, 9000), (2, 0, 2, 3), (2, 0, 2, 131)],
)
def test_invalid_requests_are_refused(op: int, reserved: int, count: int, body_bytes: int) -> None:
    """An unknown kind, an invalid number of keys, or an impossible length is refused before the body is received."""
    data = protocol.QUESTION.pack(op, reserved, count, body_bytes)
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


@pytest.mark.parametrize("data", [b"\2\0\0\0\1\0\0\0", b"\xff" * 8, b"\1\0\0\0\0\0\0\0"])
def test_invalid_parts_are_refused(data: bytes) -> None:
    """An unknown part, and one without a length or number, are refused."""
    with pytest.raises(PeerProtocolError):
        protocol.read_part(data)
