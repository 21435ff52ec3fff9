"""The tags of vLLM's requests, which precede vLLM's keys in kvstore's: the tenant, and the LoRA adapter's content."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvstore.errors import ConfigError
from kvstore.tenants import TAG_BYTES, Tags, Tenants
from kvstore.vllm.adapters import DIGEST_BYTES, NO_ADAPTER, Adapters, Check
from kvstore.vllm.compat import current_connector_scheduler, on_adapter_loaded


class RequestTags:
    """Finds the tags of requests.

    vLLM does not pass a request's cache salt or adapter to the manager, so these are read by wrapping the connector's
    ``on_new_request``. Create it during the construction of vLLM's connector, because it finds the scheduler's half in
    the call stack.

    Args:
        tenants: The rule of tenants; None without tenants.
        has_adapters: Whether requests may have LoRA adapters.

    Raises:
        ConfigError: Requests may have adapters, and this version of vLLM does not show them.
    """

    def __init__(self, tenants: Tenants | None, *, has_adapters: bool = False) -> None:
        self._tags = None if tenants is None else Tags(tenants)
        self._by = "" if tenants is None else tenants.by
        self._adapters = Adapters() if has_adapters else None
        self.parts = ["tenants"] * (tenants is not None) + ["adapters"] * has_adapters  # Names of the parts of a tag.
        # Length of a tag.
        self.tag_bytes = (TAG_BYTES if tenants is not None else 0) + (DIGEST_BYTES if has_adapters else 0)
        self._request: Any = None
        """The request being added."""
        if self._adapters is not None:
            on_adapter_loaded(self._adapters.check)
        scheduler: Any = current_connector_scheduler()
        begin = getattr(scheduler, "on_new_request", None)
        if has_adapters and begin is None:
            raise ConfigError(
                "kvstore did not find the requests of vLLM's connector, so it can't tell LoRA adapters apart. Use a "
                "supported version of vLLM (docs/vllm.md), or start it without --enable-lora."
            )
        if begin is None or not self.tag_bytes:
            return

        def on_new_request(request: Any) -> Any:
            self._request = request
            try:
                return begin(request)
            finally:
                self._request = None

        scheduler.on_new_request = on_new_request

    def of(self, params: Any) -> tuple[bytes, Check | None]:
        """Return the tag for the request being added, and the check whose digest is still to be appended to it.

        Args:
            params: Its parameters for kvstore, unchecked.
        """
        tag = b"" if self._tags is None else self._tags.of(self._tenant(params))
        if self._adapters is None:
            return tag, None
        adapter = getattr(self._request, "lora_request", None)
        if adapter is None:
            return tag + NO_ADAPTER, None
        return tag, self._adapters.check(adapter)

    def _tenant(self, params: Any) -> str:
        if self._by == "parameter":
            value = params.get("tenant") if isinstance(params, Mapping) else None
            return value if isinstance(value, str) else ""
        if self._by == "cache_salt":
            return str(getattr(self._request, "cache_salt", None) or "")
        adapter = getattr(self._request, "lora_request", None)
        return "" if adapter is None else str(adapter.lora_name)
