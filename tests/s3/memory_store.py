"""Objects in memory, with the part of S3's protocol that object tiers use: requests to answers, without I/O."""

from __future__ import annotations

import bisect
import itertools
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from urllib.parse import parse_qs, unquote
from xml.sax.saxutils import escape, unescape

PAGE_MAX = 1000
"""Objects per page of a listing, as in every service."""

_KEY = re.compile(r"<Key>(.*?)</Key>", re.DOTALL)
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


@dataclass(slots=True)
class Answer:
    """An answer to a request."""

    status: int
    body: bytes | bytearray | memoryview = b""
    headers: dict[str, str] = field(default_factory=dict)
    length: int = -1
    """Content-Length if it differs from the body's (HEAD)."""


@dataclass(slots=True)
class StoredObject:
    """One object."""

    body: bytes | bytearray | memoryview
    etag: str
    modified_at: float


def failure(status: int, code: str, **headers: str) -> Answer:
    """Return an error in S3's format."""
    text = f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{code}</Code><Message>m</Message></Error>"
    return Answer(status, text.encode(), {"Content-Type": "application/xml", **headers})


class MemoryStore:
    """One bucket, the only one."""

    def __init__(self, bucket: str) -> None:
        self.bucket = bucket
        self.objects: dict[str, StoredObject] = {}
        self.keep_puts = True
        self._sorted: list[str] | None = []
        self._versions = itertools.count(1)

    def answer(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes | bytearray | memoryview
    ) -> Answer:
        """Handle a request; header names are in lower case."""
        path, _, query = target.partition("?")
        bucket, _, key = unquote(path).lstrip("/").partition("/")
        if bucket != self.bucket:
            return failure(404, "NoSuchBucket")
        if not key:
            return self._of_bucket(method, parse_qs(query, keep_blank_values=True), body)
        if method == "GET":
            return self._get(key, headers.get("range"))
        if method == "PUT":
            return self._put(key, headers, body)
        if method == "HEAD":
            answer = self._get(key, None)
            answer.length, answer.body = len(answer.body), b""
            return answer
        if method == "DELETE":
            self._remove(key)
            return Answer(204)
        return failure(501, "NotImplemented")

    def age(self, prefix: str, age_s: float) -> None:
        """Make objects older."""
        for key, found in self.objects.items():
            if key.startswith(prefix):
                found.modified_at -= age_s

    def _of_bucket(self, method: str, query: Mapping[str, list[str]], body: bytes | bytearray | memoryview) -> Answer:
        if method == "POST" and "delete" in query:
            keys = [unescape(found) for found in _KEY.findall(bytes(body).decode())]
            for key in keys:
                self._remove(key)
            shown = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
            return Answer(200, f"<DeleteResult>{shown}</DeleteResult>".encode(), {"Content-Type": "application/xml"})
        if method == "GET" and "location" in query:
            return Answer(200, b"<LocationConstraint></LocationConstraint>", {"Content-Type": "application/xml"})
        if method == "GET":
            return self._list({name: values[0] for name, values in query.items()})
        return Answer(200)

    def _get(self, key: str, wanted: str | None) -> Answer:
        found = self.objects.get(key)
        if found is None:
            return failure(404, "NoSuchKey")
        headers = {"ETag": found.etag, "Last-Modified": formatdate(found.modified_at, usegmt=True)}
        headers["Accept-Ranges"] = "bytes"
        match = _RANGE.fullmatch(wanted) if wanted else None
        if match is None:
            return Answer(200, found.body, headers)
        size = len(found.body)
        if match[1]:
            start, end = int(match[1]), min(int(match[2] or size), size - 1)
        else:
            start, end = max(0, size - int(match[2] or 0)), size - 1
        if start >= size:
            return failure(416, "InvalidRange", **{"Content-Range": f"bytes */{size}"})
        headers["Content-Range"] = f"bytes {start}-{end}/{size}"
        return Answer(206, memoryview(found.body)[start : end + 1], headers)

    def _put(self, key: str, headers: Mapping[str, str], body: bytes | bytearray | memoryview) -> Answer:
        there = self.objects.get(key)
        if there is not None and headers.get("if-none-match") == "*":
            return failure(412, "PreconditionFailed")
        expected = headers.get("if-match")
        if expected is not None and there is None:
            return failure(404, "NoSuchKey")
        if expected is not None and there is not None and expected.strip('"') != there.etag.strip('"'):
            return failure(412, "PreconditionFailed")
        etag = f'"{next(self._versions):032x}"'
        if self.keep_puts:
            if there is None:
                self._sorted = None
            self.objects[key] = StoredObject(body, etag, time.time())
        return Answer(200, b"", {"ETag": etag})

    def _remove(self, key: str) -> None:
        if self.objects.pop(key, None) is not None:
            self._sorted = None

    def _list(self, query: Mapping[str, str]) -> Answer:
        if self._sorted is None:
            self._sorted = sorted(self.objects)
        prefix = query.get("prefix", "")
        after = query.get("continuation-token") or query.get("start-after", "")
        first = max(bisect.bisect_left(self._sorted, prefix), bisect.bisect_right(self._sorted, after))
        limit = min(PAGE_MAX, int(query.get("max-keys", PAGE_MAX)))
        page = list(itertools.takewhile(lambda key: key.startswith(prefix), self._sorted[first : first + limit + 1]))
        more, page = len(page) > limit, page[:limit]
        parts = [
            "<?xml version='1.0' encoding='UTF-8'?><ListBucketResult xmlns='http://s3.amazonaws.com/doc/2006-03-01/'>"
            f"<Name>{self.bucket}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(page)}</KeyCount>"
            f"<MaxKeys>{limit}</MaxKeys><IsTruncated>{'true' if more else 'false'}</IsTruncated>"
        ]
        if more:
            parts.append(f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>")
        for key in page:
            found = self.objects[key]
            changed = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(found.modified_at))
            parts.append(
                f"<Contents><Key>{escape(key)}</Key><LastModified>{changed}</LastModified>"
                f"<ETag>{escape(found.etag)}</ETag><Size>{len(found.body)}</Size>"
                "<StorageClass>STANDARD</StorageClass></Contents>"
            )
        return Answer(200, "".join([*parts, "</ListBucketResult>"]).encode(), {"Content-Type": "application/xml"})
