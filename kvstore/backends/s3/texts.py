"""XML of the S3 protocol: pages of a listing, and the bodies of DeleteObjects."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final, NoReturn
from urllib.parse import unquote_plus
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from kvstore.backends.s3.client import ListPage, ObjectInfo
from kvstore.backends.s3.failures import Cause, S3Error, error_of_part, error_of_response

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
    """Return the page in the response to a ListObjectsV2 request.

    Raises:
        S3Error: The response can't be read.
    """
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
        raise S3Error(Cause.PROTOCOL, "The service's answer is no XML.") from None
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
