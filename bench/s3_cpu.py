"""CPU of what the direct S3 client does for a request beside moving bytes: signing it, and reading an answer's head.

    python bench/s3_cpu.py [--quick] [--runs N] [--json FILE]

``us_per_call`` is CPU time of this process (``time.process_time``), the median of the runs, in turns. ``sign`` is a GET
of a block with temporary credentials: by kvstore, and by botocore, with the request that botocore signs made before.
``head`` is the head of an answer of 128 KiB, with the headers that S3 sends: by kvstore's reader over httptools, by
httptools alone with callbacks that keep the headers, and by h11. All signatures are compared, and so are the lengths
that the parsers find.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import h11
import httptools
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials as BotoCredentials

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench.common import Row, arguments, print_table, write_json
from kvstore.backends.s3.http import Answer
from kvstore.backends.s3.sigv4 import Credentials, Signer

COLUMNS = ["op", "system", "us_per_call", "low", "high", "runs"]
REGION, HOST = "eu-central-1", "blocks.s3.eu-central-1.amazonaws.com"
PATH = "/kv/0a1/" + "5e" * 16 + "/" + "c7" * 32
CREDENTIALS = Credentials("AKIABENCHMARK0000000", "benchmark-secret", "token" * 100)
BODY_BYTES = 128 << 10
HEAD = (
    "HTTP/1.1 200 OK\r\n"
    f"x-amz-id-2: {'A' * 76}\r\n"
    "x-amz-request-id: 4442587FB7D0A2F9\r\n"
    "Date: Sun, 01 Mar 2026 12:30:05 GMT\r\n"
    "Last-Modified: Sun, 01 Mar 2026 12:00:00 GMT\r\n"
    'ETag: "9b2cf535f27731c974343645a3985328"\r\n'
    "x-amz-server-side-encryption: AES256\r\n"
    "Accept-Ranges: bytes\r\n"
    "Content-Type: binary/octet-stream\r\n"
    f"Content-Length: {BODY_BYTES}\r\n"
    "Server: AmazonS3\r\n\r\n"
).encode()


def kvstore_signs() -> Callable[[], str]:
    """Return what signs once."""
    signer = Signer(REGION)

    def sign() -> str:
        headers = {"host": HOST}
        signer.sign("GET", PATH, {}, headers, CREDENTIALS)
        return headers["x-amz-date"] + headers["authorization"]

    return sign


def botocore_signs() -> Callable[[], str]:
    """Return what signs once."""
    boto = BotoCredentials(CREDENTIALS.access_key, CREDENTIALS.secret_key, CREDENTIALS.token)
    signer, config = S3SigV4Auth(boto, "s3", REGION), Config(s3={"payload_signing_enabled": False})
    request = AWSRequest("GET", f"https://{HOST}{PATH}")
    request.context["client_config"] = config

    def sign() -> str:
        # It takes away what it added before.
        signer.add_auth(request)
        return str(request.headers["X-Amz-Date"]) + str(request.headers["Authorization"])

    return sign


def kvstore_reads() -> Callable[[], int]:
    """Return what reads a head once."""
    target = memoryview(bytearray(BODY_BYTES))

    def read() -> int:
        answer = Answer([target])
        answer.buffers()[0][: len(HEAD)] = HEAD
        answer.advance(len(HEAD))
        answer.release()
        return int(answer.headers["content-length"])

    return read


def httptools_reads() -> Callable[[], int]:
    """Return what reads a head once."""

    class Events:
        def __init__(self) -> None:
            self.headers: dict[bytes, bytes] = {}

        def on_header(self, name: bytes, value: bytes) -> None:
            self.headers[name.lower()] = value

    def read() -> int:
        events = Events()
        httptools.HttpResponseParser(events).feed_data(HEAD)
        return int(events.headers[b"content-length"])

    return read


def h11_reads() -> Callable[[], int]:
    """Return what reads a head once; the request that h11 wants to have seen is part of it."""
    request = h11.Request(method="GET", target=PATH, headers=[("host", HOST)])

    def read() -> int:
        connection = h11.Connection(h11.CLIENT)
        connection.send(request)
        connection.receive_data(HEAD)
        event = connection.next_event()
        return int(dict(event.headers)[b"content-length"]) if isinstance(event, h11.Response) else 0

    return read


def measure(calls: int, work: Callable[[], object]) -> float:
    """Return microseconds of CPU for a call."""
    begun = time.process_time()
    for _ in range(calls):
        work()
    return (time.process_time() - begun) / calls * 1e6


def verify(ops: dict[str, dict[str, Callable[[], object]]]) -> None:
    """Compare what all of one kind return."""
    for op, systems in ops.items():
        for _ in range(10):
            # Signatures of two seconds differ.
            if len({str(work()) for work in systems.values()}) == 1:
                break
        else:
            raise SystemExit(f"{op}: the results differ.")


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--runs", type=int, default=7, help="how often each is measured")
    given = parser.parse_args()
    calls, runs = (500, 3) if given.quick else (2000, given.runs)
    ops: dict[str, dict[str, Callable[[], object]]] = {
        "sign": {"kvstore": kvstore_signs(), "botocore": botocore_signs()},
        "head": {"kvstore": kvstore_reads(), "httptools": httptools_reads(), "h11": h11_reads()},
    }
    verify(ops)
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(runs):
        for op, systems in ops.items():
            for system, work in systems.items():
                found.setdefault((op, system), []).append(measure(calls, work))
    rows: list[Row] = [
        {
            "bench": "s3_cpu", "system": system, "op": op, "us_per_call": statistics.median(times),
            "low": min(times), "high": max(times), "runs": runs, "verified": True,
        }
        for (op, system), times in found.items()
    ]  # fmt: skip
    print_table(rows, COLUMNS)
    write_json(given.json, rows)


if __name__ == "__main__":
    main()
