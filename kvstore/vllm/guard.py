"""Guard for all methods called by vLLM, because an exception from any of them would kill the engine."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

logger = logging.getLogger("kvstore.vllm.tier")

_Method = TypeVar("_Method", bound=Callable[..., Any])


class ErrorLog:
    """Counts caught errors, and logs the first error of each place with its traceback."""

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._places: set[str] = set()
        self.count = 0  # Number of errors.

    def note(self, place: str) -> None:
        """Record the exception being handled."""
        self.count += 1
        if place not in self._places:
            self._places.add(place)
            logger.exception(
                "kvstore tier %s: error in %s, which is a bug; the engine continues without the answer. "
                "Further errors there are only counted (vllm:kvstore_internal_errors).",
                self._tier,
                place,
            )


def guarded(fallback: Callable[[], Any]) -> Callable[[_Method], _Method]:
    """Make a method return ``fallback()`` instead of raising. Its object needs an :class:`ErrorLog` named ``errors``.

    ``fallback``: returns a safe result, such as a miss.
    """

    def wrap(method: _Method) -> _Method:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            # Any exception would kill vLLM's scheduler.
            except Exception:
                self.errors.note(getattr(method, "__name__", "a method"))
                return fallback()

        return cast(_Method, call)

    return wrap
