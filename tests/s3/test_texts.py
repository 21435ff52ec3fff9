"""XML documents of a service: extracted fields, and refusals before a document costs memory or time."""

from __future__ import annotations

import tracemalloc

import pytest

from kvstore.backends.s3.failures import Cause, S3Error
from kvstore.backends.s3.http import TEXT_BYTES_MAX, parse_xml, read_deleted, read_list

LIST = "<ListBucketResult>{}</ListBucketResult>"
OBJECT = "<Contents><Key>{}</Key><Size>{}</Size><ETag>&quot;e&quot;</ETag><Owner><ID>x</ID></Owner></Contents>"


def test_a_page_is_read() -> None:
    """Objects are returned in order with their lengths, for any namespace prefix or encoding of the document."""
    parts = "<IsTruncated>true</IsTruncated>" + OBJECT.format("a", 1) + OBJECT.format("\u00fc&amp;", 22)
    prefixed = LIST.replace("<", "<s3:").replace("<s3:/", "</s3:").replace("ListBucketResult>{", "ListBucketResult>{")
    prefixed = prefixed.replace("<s3:ListBucketResult>", "<s3:ListBucketResult xmlns:s3='urn:x'>", 1)
    for text in (LIST, prefixed):
        for encoding in ("utf-8", "utf-16"):
            page = read_list(f"<?xml version='1.0' encoding='{encoding}'?>{text}".format(parts).encode(encoding))
            assert [(info.key, info.size_bytes, info.etag) for info in page.objects] == [
                ("a", 1, '"e"'),
                ("\u00fc&", 22, '"e"'),
            ]
            assert page.more


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize(
    "declaration", ["<!DOCTYPE ListBucketResult>", '<!DOCTYPE x [<!ENTITY a "b">]>', '<!DOCTYPE x SYSTEM "file:///x">']
)
def test_types_and_entities_are_refused(declaration: str, encoding: str) -> None:
    """A DTD is refused in every encoding: no entity is ever expanded."""
    text = f"<?xml version='1.0' encoding='{encoding[:6]}'?>{declaration}" + LIST.format(OBJECT.format("a", 1))
    with pytest.raises(S3Error, match=r"declares types|is not XML") as caught:
        read_list(text.encode(encoding))
    assert caught.value.cause is Cause.PROTOCOL
    if encoding in ("utf-8", "utf-16"):
        assert "declares types" in str(caught.value)


def test_a_document_of_tiny_elements_is_refused() -> None:
    """A document with as many elements as the longest text holds is refused, at little cost in memory."""
    body = b"<ListBucketResult>" + b"<a/>" * (TEXT_BYTES_MAX // 4) + b"</ListBucketResult>"

    tracemalloc.start()
    try:
        with pytest.raises(S3Error, match="elements"):
            read_list(body)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("body", [b"<html>maintenance</html>", b"<ListBucketResult/>", b"ok", b"\xff\xfe<"])
def test_invalid_delete_answers_are_failures(body: bytes) -> None:
    """Objects count as deleted only if the service says so."""
    with pytest.raises(S3Error) as caught:
        read_deleted(body)
    assert caught.value.cause is Cause.PROTOCOL


def test_failed_delete_has_the_error_of_its_object() -> None:
    """One object that may not be deleted fails the request with that object's error."""
    with pytest.raises(S3Error) as caught:
        read_deleted(b"<DeleteResult><Error><Key>k</Key><Code>AccessDenied</Code></Error></DeleteResult>")
    assert caught.value.cause is Cause.FORBIDDEN
    read_deleted(b"<DeleteResult/>")
    read_deleted(b" ")


def test_only_the_children_of_parts_count() -> None:
    """Nested elements, or elements outside an object's own part, are not taken for its fields."""
    body = b"<ListBucketResult><Key>x</Key><Contents><Owner><Key>no</Key></Owner><Key>k</Key><Size>1</Size></Contents>"
    page = read_list(body + b"<Size>9</Size></ListBucketResult>")
    assert [(info.key, info.size_bytes) for info in page.objects] == [("k", 1)]
    assert parse_xml(b"<a x='1'/>").attrib == {}
