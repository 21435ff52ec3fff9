"""Texts of the S3 protocol: pages of a list, and what a DeleteObjects asks and answers."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final
from urllib.parse import unquote_plus
from xml.parsers import expat
from xml.sax.saxutils import escape

from kvstore.backends.s3.client import ListPage, ObjectInfo
from kvstore.backends.s3.failures import Cause, S3Error, error_of_response

__all__ = ["Document", "delete_request", "read_deleted", "read_list"]

_ELEMENTS_MAX: Final = 32768
"""Elements of a document: a page of a thousand objects has twelve for each."""


def delete_request(keys: Sequence[str]) -> bytes:
    """Return the body of a DeleteObjects."""
    objects = "".join([f"<Object><Key>{escape(key)}</Key></Object>" for key in keys])
    return f"<Delete><Quiet>true</Quiet>{objects}</Delete>".encode()


def read_deleted(body: bytes) -> None:
    """Raise the first failure that the answer to a DeleteObjects names.

    Raises:
        S3Error: An object could not be removed, or the answer can't be read.
    """
    # An empty body is what some services answer to a quiet request of which all succeeded.
    if not body.strip():
        return
    document = Document(body)
    if document.root not in ("DeleteResult", "Error"):
        raise S3Error(Cause.PROTOCOL, "The answer to a DeleteObjects is another document.")
    errors = [document.texts] if document.root == "Error" else document.parts.get("Error")
    if errors:
        code = errors[0].get("Code", "")
        # As that error alone would have been answered.
        raise error_of_response(403 if code == "AccessDenied" else 500, f"<Code>{code}</Code>")


def read_list(body: bytes) -> ListPage:
    """Return the page that is the answer to a ListObjectsV2.

    Raises:
        S3Error: The answer can't be read.
    """
    document = Document(body)
    if document.root != "ListBucketResult":
        raise error_of_response(200, body[:4096].decode("utf-8", "replace"))
    quoted = document.texts.get("EncodingType") == "url"
    try:
        objects = [_object_of(part, quoted) for part in document.parts.get("Contents", ())]
    except ValueError:
        raise S3Error(Cause.PROTOCOL, "The list of objects can't be read.") from None
    return ListPage(objects, document.texts.get("IsTruncated") == "true")


def _object_of(part: dict[str, str], quoted: bool) -> ObjectInfo:
    key, modified = part.get("Key", ""), part.get("LastModified", "")
    return ObjectInfo(
        unquote_plus(key) if quoted else key,
        int(part.get("Size", "")),
        part.get("ETag", ""),
        datetime.fromisoformat(modified).timestamp() if modified else 0.0,
    )


class Document:
    """An XML document that a service sent, read without the parts of XML that are traps.

    Types and entities are refused in whatever encoding they come, and so are more elements than a service sends.

    Args:
        body: The document.

    Attributes:
        root: Name of its root element.
        texts: Text of the root's children that have no children themselves, by name.
        parts: The other children by name: the texts of their children. Deeper ones are passed over.

    Raises:
        S3Error: It is not such a document.
    """

    def __init__(self, body: bytes) -> None:
        self.root = ""
        self.texts: dict[str, str] = {}
        self.parts: dict[str, list[dict[str, str]]] = {}
        self._path: list[str] = []
        self._part: dict[str, str] = {}
        self._text = ""
        self._elements = 0
        parser = expat.ParserCreate()
        parser.buffer_text = True
        parser.StartDoctypeDeclHandler = _refuse
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._data
        try:
            parser.Parse(body, True)
        except (expat.ExpatError, ValueError, LookupError):
            raise S3Error(Cause.PROTOCOL, "The service's answer is no XML.") from None

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        self._elements += 1
        if self._elements > _ELEMENTS_MAX:
            raise S3Error(Cause.PROTOCOL, f"The service's XML has more than {_ELEMENTS_MAX} elements.")
        # Some services give the namespace of S3 a prefix, most do not.
        self._path.append(name.rpartition(":")[2])
        self._text = ""
        if len(self._path) == 1:
            self.root = self._path[0]
        elif len(self._path) == 2:
            self._part = {}

    def _end(self, name: str) -> None:
        depth, own = len(self._path), self._path.pop()
        if depth == 2 and self._part:
            self.parts.setdefault(own, []).append(self._part)
        elif depth == 2:
            self.texts[own] = self._text
        elif depth == 3:
            self._part[own] = self._text
        self._text = ""

    def _data(self, text: str) -> None:
        if len(self._path) <= 3:
            self._text += text


def _refuse(*declaration: object) -> None:
    raise S3Error(Cause.PROTOCOL, "The service's XML declares types or entities, which no service does.")
