"""Selectors of kvstore's metrics in PromQL, from the list of metrics in kvstore.vllm.metrics."""

from __future__ import annotations

from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingHistogramMetadata

from kvstore.vllm.metrics import engine_metric_definitions, manager_metric_definitions, metric_definitions

DECLARED = {**metric_definitions(), **manager_metric_definitions(), **engine_metric_definitions()}

_PREFIX = "vllm:kvstore_"
_OF_PROMETHEUS = {"instance", "le"}
"""Labels that Prometheus adds to all metrics, and to the buckets of histograms."""


def series(name: str, **labels: str) -> str:
    """Return the selector of a metric of kvstore, with its name in Prometheus.

    Args:
        name: Name without ``vllm:kvstore_``; for a histogram, the buckets are selected.
        labels: Label values, with their operator: ``cause="=~'a|b'"``.

    Raises:
        KeyError: kvstore declares no such metric or label.
    """
    check_labels(name, set(labels))
    chosen = ",".join(f"{label}{value}" for label, value in labels.items())
    return _PREFIX + name + _ending(name) + (f"{{{chosen}}}" if chosen else "")


def check_labels(name: str, labels: set[str]) -> None:
    """Check that a metric has these labels.

    Raises:
        KeyError: kvstore declares no such metric or label.
    """
    declared = DECLARED[_PREFIX + name].labelnames
    if unknown := labels - set(declared) - _OF_PROMETHEUS:
        raise KeyError(f"{name} has no labels {unknown}, only {declared}")


def _ending(name: str) -> str:
    metadata = DECLARED[_PREFIX + name]
    if isinstance(metadata, OffloadingCounterMetadata):
        return "_total"
    return "_bucket" if isinstance(metadata, OffloadingHistogramMetadata) else ""
