"""Answers of servers: what they say, and how much of it is certain."""

from __future__ import annotations

import http.client
import json
from typing import Any, Final

NEAR: Final = 1e-3
"""Log probabilities this close are a tie, which the order of a sum may decide."""
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


def certain(port: int, body: dict[str, Any]) -> tuple[list[int], str]:
    """Return the tokens of a completion up to the first near tie, and their text."""
    asked = {name: value for name, value in body.items() if not name.startswith("stream")}
    answer = post(port, "/v1/completions", {**asked, "logprobs": 2, "return_token_ids": True})
    (choice,) = answer["choices"]
    tokens: list[int] = []
    for token, best in zip(choice["token_ids"], choice["logprobs"]["top_logprobs"], strict=True):
        first, second = sorted(best.values(), reverse=True)[:2]
        if first - second < NEAR:
            break
        tokens.append(token)
    return tokens, "".join(choice["logprobs"]["tokens"][: len(tokens)])
