"""Incremental parsing of HTTP/1.1 responses; the body of an object goes directly into its buffers.

httptools (llhttp, the parser of Node.js) parses heads, texts and chunks. This module only chooses the destination:
after the head of an object, the rest of its body is received into the buffers without a parser.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final, NoReturn
from urllib.parse import unquote_plus
from xml.etree import ElementTree
from xml.sax.saxutils import escape

import httptools

from kvstore.backends.s3.client import ListPage, ObjectInfo
from kvstore.backends.s3.failures import Cause, S3Error, error_of_part, error_of_response
from kvstore.backends.vectored import cut, drop_front, scatter

_ELEMENTS_MAX: Final = 32768
"""Maximum number of elements in a document: a page of a thousand objects has twelve for each."""


def delete_request(keys: Sequence[str]) -> bytes:
    """Return the body of a DeleteObjects request."""
    objects = "".join([f"<Object><Key>{escape(key)}</Key></Object>" for key in keys])
    return f"<Delete><Quiet>true</Quiet>{objects}</Delete>".encode()


def read_deleted(body: bytes) -> None:
    """Raise the first failure in the response to a DeleteObjects request.

    Raises:
        S3Error: An object could not be removed, or the response can't be read.
    """
    # Some services answer a quiet request with an empty body if every removal succeeded.
    if not body.strip():
        return
    root = parse_xml(body)
    if root.tag not in ("DeleteResult", "Error"):
        raise S3Error(Cause.PROTOCOL, "The answer to a DeleteObjects is another document.")
    error = root if root.tag == "Error" else root.find("Error")
    if error is not None:
        raise error_of_part(error.findtext("Code", ""))


def read_list(body: bytes) -> ListPage:
    """Return the page in the response to a ListObjectsV2 request. ``S3Error``: the response can't be read."""
    root = parse_xml(body)
    if root.tag != "ListBucketResult":
        raise error_of_response(200, body[:4096].decode("utf-8", "replace"))
    is_quoted = root.findtext("EncodingType") == "url"
    try:
        objects = [_object_of(part, is_quoted) for part in root.findall("Contents")]
    except ValueError:
        raise S3Error(Cause.PROTOCOL, "The list of objects can't be read.") from None
    return ListPage(objects, root.findtext("IsTruncated") == "true")


def parse_xml(body: bytes) -> ElementTree.Element:
    """Return the root of a service's XML document, with tag names without their namespaces.

    Refuses declarations of types and entities in any encoding, and documents with too many elements.
    """
    parser = ElementTree.XMLParser(target=_Builder())
    try:
        parser.feed(body)
        root: ElementTree.Element = parser.close()
    except (ElementTree.ParseError, ValueError, LookupError):
        raise S3Error(Cause.PROTOCOL, "The service's answer is not XML.") from None
    return root


class _Builder(ElementTree.TreeBuilder):
    """Builds elements without attributes, up to the maximum number."""

    def __init__(self) -> None:
        super().__init__()
        self._elements = 0

    def doctype(self, *declaration: object) -> NoReturn:
        """Refuse declarations, which could define entities."""
        raise S3Error(Cause.PROTOCOL, "The service's XML declares types or entities, which no service does.")

    def start(self, tag: str, attrs: object, /) -> ElementTree.Element:
        """Begin an element."""
        self._elements += 1
        if self._elements > _ELEMENTS_MAX:
            raise S3Error(Cause.PROTOCOL, f"The service's XML has more than {_ELEMENTS_MAX} elements.")
        return super().start(tag.rpartition("}")[2], {})


def _object_of(part: ElementTree.Element, is_quoted: bool) -> ObjectInfo:
    key, modified = part.findtext("Key", ""), part.findtext("LastModified", "")
    return ObjectInfo(
        unquote_plus(key) if is_quoted else key,
        int(part.findtext("Size", "")),
        part.findtext("ETag", ""),
        datetime.fromisoformat(modified).timestamp() if modified else 0.0,
    )


_HEAD_BYTES: Final = 2048
"""Size of the first receive: about one typical head, because body bytes received with the head must be copied."""

_HEAD_BYTES_MAX: Final = 65536

TEXT_BYTES_MAX: Final = 4 << 20
"""Longest body outside of the buffers; a listing of a thousand long names is much shorter."""

_TEXT_PIECES_MAX: Final = 16384
"""Maximum number of pieces of such a body. Each piece costs a call, and services send chunks of kilobytes."""

_INTERIM_MAX: Final = 8
"""Maximum number of interim responses, such as "100 Continue", before the final one."""

_ROOM_BYTES: Final = 65536
_KEPT: Final = frozenset(
    {b"content-length", b"content-range", b"etag", b"last-modified", b"transfer-encoding", b"connection"}
)


class Answer:
    """One response, without I/O: :meth:`buffers` returns the buffers for the next bytes, :meth:`advance` parses them.

    The body of a success goes into ``targets``, if given; every other body is kept in memory. With ``bodiless`` (a
    response to HEAD) no body follows, regardless of the head.
    """

    def __init__(self, targets: Sequence[memoryview] = (), *, bodiless: bool = False) -> None:
        self.status = 0  # HTTP status; 0 until the head is complete.
        self.headers: dict[str, str] = {}  # The headers that the client uses, with names in lower case.
        self.filled_bytes = 0  # Bytes of the body received into the buffers so far.
        self.whole = False  # Whether the response is complete.
        self.surplus = False  # Whether bytes arrived after the end of the response.
        self.stays_open = False  # Whether the connection may carry another request.
        self._targets = [target for target in targets if target.nbytes]
        self._bodiless = bodiless
        # Calls the on_ methods. Dropped when the response is complete, to break the reference cycle.
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._room = memoryview(bytearray(_HEAD_BYTES))
        self._head_bytes = 0
        self._interim = 0
        self._text: list[bytes] = []
        self._text_bytes = 0
        self._parsed = False
        # Missing bytes of the object; None if the body does not go into the buffers.
        self._rest: int | None = None

    @property
    def started(self) -> bool:
        """Whether any byte of the response has arrived."""
        return self._head_bytes > 0

    @property
    def body(self) -> bytes:
        """The body, unless it went into the buffers."""
        return b"".join(self._text)

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")

    def buffers(self) -> list[memoryview]:
        """Return the buffers for the next bytes."""
        return [self._room] if self._rest is None else cut(self._targets, self._rest)

    def advance(self, count: int) -> None:
        """Process ``count`` bytes received into :meth:`buffers`, 0 at the end of the stream; S3Error if malformed."""
        if not count:
            self._end_of_stream()
        elif self._rest is not None:
            self._fill(count)
        elif self._parser is not None:
            self._read(self._parser, self._room[:count])

    def release(self) -> None:
        """Drop all references to the buffers."""
        self._targets = []
        self._parser = None

    def _read(self, parser: httptools.HttpResponseParser, piece: memoryview) -> None:
        is_new = not self.status
        try:
            parser.feed_data(piece)
        # HttpParserUpgrade, raised for status 101, is not a subclass of HttpParserError.
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self._parsed:
                raise S3Error(Cause.PROTOCOL, f"The answer is not HTTP: {type(error).__name__}.") from None
            self.surplus = True
        if is_new:
            self._head_bytes += piece.nbytes
            if not self.status:
                if self._head_bytes > _HEAD_BYTES_MAX or self._interim > _INTERIM_MAX:
                    raise S3Error(Cause.PROTOCOL, f"The head of the answer is longer than {_HEAD_BYTES_MAX} bytes.")
                return
            self._choose_target(parser)
            if self._rest is not None:
                return
        if self._text_bytes > TEXT_BYTES_MAX or len(self._text) > _TEXT_PIECES_MAX:
            raise S3Error(Cause.PROTOCOL, "An answer is longer, or in more pieces, than any text of a service.")
        if self._parsed or self._bodiless:
            self._finish()

    def _choose_target(self, parser: httptools.HttpResponseParser) -> None:
        """Choose the destination of the body after the head."""
        if self._bodiless:
            # Without a length, the parser would expect a body until the end of the stream.
            closes = self.headers.get("connection", "").lower() == "close"
            self.stays_open = not closes and parser.get_http_version() == "1.1"
            return
        length = int(self.headers.get("content-length", -1))
        if not self._targets or self.status not in (200, 206):
            if length > TEXT_BYTES_MAX:
                raise S3Error(Cause.PROTOCOL, f"An answer of {length} bytes is longer than any text of a service.")
            self._room = memoryview(bytearray(_ROOM_BYTES))
            return
        if length < 0:
            raise S3Error(Cause.PROTOCOL, "The service sends an object without its length.")
        capacity = sum(target.nbytes for target in self._targets)
        if length > capacity:
            raise S3Error(Cause.LENGTH, f"The object has {length} bytes, {capacity} fit.")
        self._rest = length
        # Body bytes that arrived together with the head are copied.
        self._fill(scatter(self.body, self._targets))
        self._text = []
        self._parser = None

    def _fill(self, count: int) -> None:
        if self._rest is None:
            return
        self.filled_bytes += count
        self._rest -= count
        drop_front(self._targets, count)
        self.whole = not self._rest

    def _finish(self) -> None:
        if self._bodiless and self._text:
            self.surplus, self._text = True, []
        self.whole = True
        self._parser = None

    def _end_of_stream(self) -> None:
        if not self.started:
            raise S3Error(Cause.RESET, "The service closed the connection before its answer.")
        if not self.status or "content-length" in self.headers or "transfer-encoding" in self.headers:
            raise S3Error(Cause.CUT, "The service closed the connection within its answer.")
        self.stays_open = False
        self._finish()

    def on_message_begin(self) -> None:
        """Called by the parser; a second response is surplus."""
        self.surplus |= self._parsed

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser; trailer fields are ignored."""
        name = name.lower()
        if not self.status and name in _KEPT:
            self.headers[name.decode()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Called by the parser; interim responses are skipped."""
        if self._parser is None or self.status:
            return
        status = self._parser.get_status_code()
        if status < 200:
            self._interim += 1
            self.headers = {}
        else:
            self.status = status
            self.stays_open = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        """Called by the parser; pieces beyond the limits are dropped."""
        if not self._parsed and self._text_bytes <= TEXT_BYTES_MAX and len(self._text) <= _TEXT_PIECES_MAX:
            self._text.append(body)
            self._text_bytes += len(body)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        self._parsed = self.status > 0
