"""Texts of the S3 protocol: pages of a list, and what a DeleteObjects asks and answers."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final
from urllib.parse import unquote_plus
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from kvstore.backends.s3.client import ListPage, ObjectInfo
from kvstore.backends.s3.failures import Cause, S3Error, error_of_response

__all__ = ["delete_request", "looks_like_error", "read_deleted", "read_list"]

_XML_STARTS: Final = (b"<?xml", b"<Erro")


def looks_like_error(start: bytes) -> bool:
    """Tell whether a body begins as an error does. No record does: its first byte is no text."""
    return start.startswith(_XML_STARTS)


def delete_request(keys: Sequence[str]) -> bytes:
    """Return the body of a DeleteObjects."""
    objects = "".join([f"<Object><Key>{escape(key)}</Key></Object>" for key in keys])
    return f"<Delete><Quiet>true</Quiet>{objects}</Delete>".encode()


def read_deleted(body: bytes) -> None:
    """Raise the first failure that the answer to a DeleteObjects tells.

    Raises:
        S3Error: An object could not be removed, or the answer can't be read.
    """
    # An empty body is what some services answer to a quiet request of which all succeeded.
    root = _parsed(body) if body.strip() else None
    if root is not None and (root.tag == "Error" or root.find("Error") is not None):
        error = root if root.tag == "Error" else root.find("Error")
        code = error.findtext("Code", "") if error is not None else ""
        # As that error alone would have been answered.
        raise error_of_response(403 if code == "AccessDenied" else 500, f"<Code>{code}</Code>")


def read_list(body: bytes) -> ListPage:
    """Return the page that the answer to a ListObjectsV2 tells.

    Raises:
        S3Error: The answer can't be read.
    """
    root = _parsed(body)
    if root.tag != "ListBucketResult":
        raise error_of_response(200, body[:4096].decode("utf-8", "replace"))
    quoted = root.findtext("EncodingType", "") == "url"
    try:
        objects = [_object_of(item, quoted) for item in root.iterfind("Contents")]
    except ValueError:
        raise S3Error(Cause.PROTOCOL, "The list of objects can't be read.") from None
    return ListPage(objects, root.findtext("IsTruncated", "") == "true")


def _object_of(item: ElementTree.Element, quoted: bool) -> ObjectInfo:
    key = item.findtext("Key", "")
    modified = item.findtext("LastModified", "")
    return ObjectInfo(
        unquote_plus(key) if quoted else key,
        int(item.findtext("Size", "")),
        item.findtext("ETag", ""),
        datetime.fromisoformat(modified).timestamp() if modified else 0.0,
    )


def _parsed(body: bytes) -> ElementTree.Element:
    """Parse a document that a service sent, without the parts of XML that are traps."""
    if b"<!" in body:
        raise S3Error(Cause.PROTOCOL, "The service's XML declares types or entities, which no service does.")
    try:
        root = ElementTree.fromstring(body)
    except (ElementTree.ParseError, ValueError):
        raise S3Error(Cause.PROTOCOL, "The service's answer is no XML.") from None
    for element in root.iter():
        # Some services name the namespace of S3, some do not.
        element.tag = element.tag.rpartition("}")[2]
    return root
