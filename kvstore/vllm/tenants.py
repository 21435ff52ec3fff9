"""The tenants of vLLM's requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvstore.tenants import Tags, Tenants
from kvstore.vllm.compat import current_connector_scheduler

__all__ = ["RequestTags"]


class RequestTags:
    """Finds the tag of a request's tenant.

    vLLM does not pass a request's cache salt or adapter to the manager, so these are read by wrapping the connector's
    ``on_new_request``. Create it during the construction of vLLM's connector, because it finds the scheduler's half in
    the call stack.

    Args:
        tenants: The rule.
    """

    def __init__(self, tenants: Tenants) -> None:
        self._tags = Tags(tenants)
        self._by = tenants.by
        self._value = ""
        """Value of the rule for the request being added."""
        scheduler: Any = current_connector_scheduler()
        begin = getattr(scheduler, "on_new_request", None)
        if begin is None:
            return

        def on_new_request(request: Any) -> Any:
            self._value = self._read(request)
            try:
                return begin(request)
            finally:
                self._value = ""

        scheduler.on_new_request = on_new_request

    def of(self, params: Any) -> bytes:
        """Return the tag for the request being added.

        Args:
            params: Its parameters for kvstore, unchecked.
        """
        value: object = self._value
        if self._by == "parameter":
            value = params.get("tenant") if isinstance(params, Mapping) else ""
        return self._tags.of(value if isinstance(value, str) else "")

    def _read(self, request: Any) -> str:
        if self._by == "cache_salt":
            return str(request.cache_salt or "")
        adapter = getattr(request, "lora_request", None)
        return "" if adapter is None else str(adapter.lora_name)
