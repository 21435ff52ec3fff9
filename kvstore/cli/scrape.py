"""The metrics of running engines: fetched from their /metrics and parsed."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Final
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from kvstore.errors import ConfigError
from kvstore.secret import shown

__all__ = ["Engine", "Sample", "Watch", "parse"]

_PREFIX: Final = "vllm:kvstore_"
_WINDOW_S: Final = 10.0
"""Rates are those of so long: engines report a few times a second, and a tier may load once in some seconds."""

_BODY_MAX: Final = 64 << 20
"""A server with all of vLLM's metrics has less than one of these MiB; others are no engine."""

_FETCHES_MAX: Final = 16

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Sample:
    """The metrics of one engine at one time.

    Attributes:
        at: When, on the monotonic clock.
        values: By name without its prefix, then by labels, without those of vLLM.
    """

    at: float
    values: dict[str, dict[Labels, float]] = field(default_factory=dict)

    def total(self, name: str, **labels: str) -> float | None:
        """Return the sum of the series that have these labels; None if there is none."""
        wanted = labels.items()
        found = [value for has, value in self.values.get(name, {}).items() if wanted <= has]
        return sum(found) if found else None

    def label_values(self, name: str, label: str) -> list[str]:
        """Return the values of a label of a metric, in the order of the metrics page."""
        return list(dict.fromkeys(value for has in self.values.get(name, {}) for key, value in has if key == label))


@dataclass(slots=True)
class Engine:
    """One engine that is watched.

    Attributes:
        name: Its address; with the number of the engine where a server has several.
        samples: Those of the last seconds, oldest first.
    """

    name: str
    samples: list[Sample] = field(default_factory=list)

    def add(self, sample: Sample) -> None:
        """Take in a sample; the newest that is as old as the window stays, as rates begin there."""
        while len(self.samples) > 1 and self.samples[1].at <= sample.at - _WINDOW_S:
            del self.samples[0]
        self.samples.append(sample)


class Watch:
    """Engines, scraped at once.

    Args:
        addresses: ``host:port``, or URLs.
        timeout_s: For one answer.

    Attributes:
        engines: Those that have answered, in the order of the addresses.
        problems: By address, why the last scrape of it failed.

    Raises:
        ConfigError: An address is not valid.
    """

    def __init__(self, addresses: Sequence[str], timeout_s: float) -> None:
        self._urls = {address: _url_of(address) for address in addresses}
        self._timeout_s = timeout_s
        self._found: dict[str, dict[str, Engine]] = {address: {} for address in self._urls}
        self.problems: dict[str, str] = {}

    @property
    def engines(self) -> list[Engine]:
        """See the class."""
        return [engine for found in self._found.values() for engine in found.values()]

    def scrape(self) -> None:
        """Fetch all addresses at once. What fails becomes a problem, and its engines are dropped."""
        self.problems = {}
        with ThreadPoolExecutor(min(_FETCHES_MAX, len(self._urls))) as pool:
            answers = pool.map(self._fetch, self._urls.values())
        for address, answer in zip(self._urls, answers, strict=True):
            if isinstance(answer, str):
                self.problems[address] = answer
                self._found[address] = {}
                continue
            engines = self._found[address]
            for number, sample in answer.items():
                name = address if len(answer) == 1 else f"{address}#{number}"
                engines.setdefault(number, Engine(name)).add(sample)

    def _fetch(self, url: str) -> dict[str, Sample] | str:
        """Return the samples by engine, or what is wrong."""
        try:
            with urlopen(url, timeout=self._timeout_s) as response:
                body = response.read(_BODY_MAX + 1)
            if len(body) > _BODY_MAX:
                return f"the answer is longer than {_BODY_MAX >> 20} MiB"
            return parse(body.decode(), time.monotonic()) or "no metrics of kvstore: no vLLM with a kvstore tier"
        except URLError as error:
            if isinstance(error, HTTPError):
                return str(error)
            reason = error.reason
            return (reason.strerror if isinstance(reason, OSError) else None) or str(reason)
        except (OSError, HTTPException, ValueError) as error:
            return str(error) or type(error).__name__


def parse(text: str, at: float) -> dict[str, Sample]:
    """Return kvstore's metrics on a page, by vLLM's number of the engine.

    Args:
        text: In Prometheus' text format.
        at: When it was fetched, on the monotonic clock.

    Raises:
        ValueError: It is not in that format.
    """
    found: dict[str, Sample] = {}
    for name, labels, value in _series(text):
        engine = labels.pop("engine", "0")
        labels.pop("model_name", None)
        values = found.setdefault(engine, Sample(at)).values
        values.setdefault(name, {})[frozenset(labels.items())] = value
    return found


def _series(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield name, labels and value of each of kvstore's series; the rest of the page is not even parsed."""
    lines = (line for line in text.split("\n") if line.startswith(_PREFIX))
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            value = float(sample.value)
            if not math.isfinite(value):
                raise ValueError(f"{sample.name} is {value}")
            float(sample.labels.get("le", 0))  # A bound of a histogram that is no number is an error here.
            yield sample.name.removeprefix(_PREFIX), dict(sample.labels), value


def _url_of(address: str) -> str:
    url = address if "://" in address else f"http://{address}"
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise ConfigError(
            f"{shown(address)} is not an address of metrics. Expected HOST:PORT, or http://HOST:PORT/metrics."
        )
    return url if parts.path.strip("/") else f"{url.rstrip('/')}/metrics"
