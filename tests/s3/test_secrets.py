"""No secret appears anywhere: in logs of all levels, errors, reprs or statistics."""

from __future__ import annotations

import base64
import contextlib
import logging
import random
import traceback
from pathlib import Path
from typing import Any

import pytest

from kvstore.backends.base import RecordGeometry
from kvstore.backends.s3 import S3Backend
from kvstore.backends.s3.failures import S3Error
from kvstore.config import encode_config
from kvstore.errors import KVStoreError
from kvstore.testing.records import RecordMaker
from kvstore.types import Outcome
from tests.s3.clients import CLIENTS, NAMESPACE, config_for, opened
from tests.s3.fault_server import Fault, FaultServer
from tests.s3.servers import S3Server

SECRET = "canary-secret-wJalrXUtnFEMI/K7MDENG"
TOKEN = "canary-token-IQoJb3JpZ2luX2VjEJr"
SSE_KEY = base64.b64encode(b"canary-customer-key-of-32-bytes!").decode()
CANARIES = ("canary", SSE_KEY, SSE_KEY[:20], "environment-secret-canary")
SECRETS: dict[str, Any] = {"secret_access_key": SECRET, "session_token": TOKEN, "sse_customer_key": SSE_KEY}
FAULTS = (
    *(Fault.RESET_BEFORE, Fault.RESET_AFTER, Fault.CUT, Fault.INTERNAL, Fault.SLOW_DOWN, Fault.FORBIDDEN),
    *(Fault.REDIRECT, Fault.XML_ERROR, Fault.GARBAGE, Fault.BLACK_HOLE, Fault.BAD_RANGE, Fault.PRECONDITION),
)


class Everything(logging.Handler):
    """Keeps the text of every log record, with its traceback."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.texts: list[str] = []
        self.setFormatter(logging.Formatter("%(name)s %(message)s %(args)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))


@pytest.fixture
def everything() -> Any:
    """Capture all loggers at their lowest level, including those of botocore and aiohttp."""
    handler, root, botocore = Everything(), logging.getLogger(), logging.getLogger("botocore")
    levels = root.level, botocore.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield handler.texts
    root.removeHandler(handler)
    root.setLevel(levels[0])
    botocore.setLevel(levels[1])


async def fail_often(faults: FaultServer, client: str, rng: random.Random) -> tuple[list[str], int]:
    """Make requests fail in all ways; return all visible texts, and the number of failures."""
    seen: list[str] = []
    failed = 0
    backend = None
    while backend is None:
        # Deadlines are short for the faults that never answer; a busy machine may miss other deadlines too.
        with contextlib.suppress(S3Error):
            backend = await opened(faults, client=client, **SECRETS, timeout=0.2, load_timeout=0.4, store_timeout=0.4)
    maker = RecordMaker(NAMESPACE, backend.geometry, rng)
    for fault in FAULTS:
        faults.plan(fault)
        keys = [maker.key() for _ in range(4)]
        outcomes = [
            *await backend.put([maker.write(key, b"x" * 100) for key in keys]),
            *await backend.get_into([maker.target(key).read for key in keys]),
        ]
        failed += sum(outcome not in (Outcome.OK, Outcome.MISS) for outcome in outcomes)
        for call in (backend.exists(keys), backend.delete(keys), backend.quarantine(keys), backend.probe()):
            try:
                await call
            except KVStoreError as error:
                failed += 1
                seen += traceback.format_exception(error)
        seen += [repr(backend), repr(vars(backend)), backend.last_error, repr(backend.stats())]
    faults.plan(None)
    seen += [repr(backend.config), str(backend.config), str(encode_config(backend.config))]
    seen += [repr(vars(value)) for value in vars(backend).values() if hasattr(value, "__dict__")]
    await backend.close()
    return seen, failed


async def test_no_secret_is_seen(
    faults: FaultServer, weed_server: S3Server, weed_tls: S3Server, everything: list[str], rng: random.Random
) -> None:
    """Over two hundred failures of all kinds show no secret, with either client.

    With aioboto3, botocore's own loggers are at INFO, as the warning of the next test demands.
    """
    seen: list[str] = []
    failed = 0
    for client in CLIENTS:
        if client == "aioboto3":
            logging.getLogger("botocore").setLevel(logging.INFO)
        more, count = await fail_often(faults, client, rng)
        seen += more
        failed += count
        for server, wrong in (
            (weed_server, SECRETS | {"sse_customer_key": None}),
            (weed_server, SECRETS | {"session_token": None, "sse_customer_key": None}),
            (weed_tls, SECRETS | {"tls_ca": None}),
            (weed_tls, SECRETS | {"tls_ca": "/etc/hostname"}),
            (weed_server, SECRETS | {"bucket": "not-there"}),
            (weed_server, SECRETS | {"endpoint": "http://127.0.0.1:9"}),
        ):
            backend = S3Backend(config_for(server, client=client, **wrong))
            try:
                await backend.open(NAMESPACE, RecordGeometry(256, 4096))
            except KVStoreError as error:
                failed += 1
                seen += [*traceback.format_exception(error), repr(backend), repr(vars(backend))]
            await backend.close()
    assert failed >= 200
    text = "\n".join([*seen, *everything, Path("/proc/self/cmdline").read_text()])
    assert len(text) > 10_000, "nothing was heard"
    for canary in CANARIES:
        place = text.find(canary)
        assert place < 0, f"{canary} in …{text[max(0, place - 200) : place + 100]}…"


async def test_loggers_that_show_secrets_are_warned_of(faults: FaultServer, everything: list[str]) -> None:
    """If botocore would log secrets, aioboto3's client warns, and leaves the loggers unchanged."""
    for level, warned in ((logging.NOTSET, True), (logging.INFO, False)):
        logging.getLogger("botocore").setLevel(level)
        everything.clear()
        backend = await opened(faults, client="aioboto3")
        await backend.close()
        assert any("Set the logger 'botocore' to INFO" in text for text in everything) is warned
        assert logging.getLogger("botocore").level == level
        assert logging.getLogger("aiobotocore").level == logging.NOTSET
