"""Requests to servers, and the part of an answer that is certain."""

from __future__ import annotations

import http.client
import json
from typing import Any, Final

from tests.vllm.near_ties import NEAR, before_tie

TIMEOUT_S: Final = 120


def post(port: int, path: str, body: dict[str, Any], patience_s: float = TIMEOUT_S) -> Any:
    """Send a request and return the answer; None if it did not come in time, after a disconnect.

    Raises:
        RuntimeError: The server returned an error, or did not answer within ``TIMEOUT_S``.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=patience_s)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        content = response.read()
    except TimeoutError:
        if patience_s >= TIMEOUT_S:
            raise RuntimeError(f"{path} did not answer within {TIMEOUT_S} s") from None
        return None
    finally:
        connection.close()
    if response.status != 200:
        raise RuntimeError(f"{path} answered {response.status}: {content[:500]!r}")
    return json.loads(content) if content else {}


def certain(port: int, body: dict[str, Any]) -> tuple[list[int], list[str]]:
    """Return the tokens of a completion up to the first near tie, and the texts with one of which every answer begins.

    These are the text of the tokens, each with one of the words that are nearly as likely.
    """
    asked = {name: value for name, value in body.items() if not name.startswith("stream")}
    answer = post(port, "/v1/completions", {**asked, "logprobs": 5, "return_token_ids": True})
    (choice,) = answer["choices"]
    logprobs = choice["logprobs"]
    tokens = before_tie(choice["token_ids"], (likeliest.values() for likeliest in logprobs["top_logprobs"]))
    text = "".join(logprobs["tokens"][: len(tokens)])
    if len(tokens) == len(choice["token_ids"]):
        return tokens, [text]
    likeliest = logprobs["top_logprobs"][len(tokens)]
    return tokens, [text + word for word, logprob in likeliest.items() if logprob > max(likeliest.values()) - NEAR]
