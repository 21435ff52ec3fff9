"""Notes of lineage on the medium: who can read them, and what is no note."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.runtime.messages import KeepLineage, LineageFound
from kvstore.tiers.lineage import LineageNotes
from tests.seal.keyrings import NAMESPACE, document, make_seal, write

MESSAGE = KeepLineage((b"a", b"b"), (b"lineage of a", b""), (b"secret of a", b""))
NOTHING = LineageFound((), (), ())


def some_notes(path: Path | None) -> LineageNotes:
    """Return the notes of a tier that encrypts with the keyring in a file, or not at all."""
    return LineageNotes(NAMESPACE, None if path is None else make_seal(path))


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A keyring with one key."""
    return write(tmp_path / "keys", document(1))


def test_a_later_engine_reads_lineage_and_secrets(keys: Path) -> None:
    """With encryption the notes have the secrets, and the medium sees neither them nor the lineage."""
    notes = some_notes(keys).notes_of(MESSAGE)
    assert some_notes(keys).found(notes, lambda name: name) == LineageFound(
        MESSAGE.keys, MESSAGE.lineage, MESSAGE.secrets
    )
    assert not any(b"of a" in note for _, note in notes)


def test_without_encryption_the_secrets_are_not_stored() -> None:
    """The lineage alone is stored and read."""
    notes = some_notes(None).notes_of(MESSAGE)
    assert some_notes(None).found(notes, lambda name: name) == LineageFound(MESSAGE.keys, MESSAGE.lineage, (b"", b""))
    assert not any(b"secret" in note for _, note in notes)


def test_notes_of_the_other_form_are_ignored(keys: Path) -> None:
    """A tier that encrypts reads no plain notes, and the other way round."""
    for writer, reader in ((keys, None), (None, keys)):
        assert some_notes(reader).found(some_notes(writer).notes_of(MESSAGE), lambda name: name) == NOTHING


def test_a_note_that_was_cut_or_changed_is_ignored(keys: Path) -> None:
    """Whatever its length, damage neither raises nor hides the notes beside it."""
    (name, note), other = some_notes(keys).notes_of(MESSAGE)
    damaged = [note[:end] for end in range(len(note))]
    damaged += [note[:at] + bytes([note[at] ^ 1]) + note[at + 1 :] for at in (0, 1, 5, 9, 30, len(note) - 1)]
    for bad in damaged:
        found = some_notes(keys).found([(name, bad), other], lambda name: name)
        assert found.keys == (b"b",), len(bad)
