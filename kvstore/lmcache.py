"""An L2 adapter for LMCache's server: its objects in tiers of kvstore, through LMCache's adapter type ``plugin``.

LMCache has three interfaces for third parties. This is the one for its standalone server (``lmcache server``), which
its documentation recommends. Remote connectors and storage plugins belong to the older mode inside the engine's
process, and ``external://`` is deprecated. See docs/lmcache.md.

LMCache gives objects of any length at any address, and a tier has rows of one length. So each layout of objects has its
own tier over a few rows of staging memory, and every object is copied once.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from kvstore.errors import ConfigError, KVStoreError
from kvstore.namespace import Namespace
from kvstore.primary.region import Region, rounded_up
from kvstore.tiers.threaded import ThreadedTier, check_threaded_tier

logger = logging.getLogger("kvstore.lmcache")

_STAGING_BYTES = 256 << 20
"""Staging memory of a layout: some tens of objects of 8 MiB, enough to keep an SSD busy while others are copied."""

_ROWS_MAX = 64

_WORKERS = 8
"""Threads for stores, and as many for lookups and loads: LMCache has at most eight prefetches in flight by default."""

_LAYOUTS_MAX = 32
"""Most tiers. A server has one per model and group of layers; more would be a client that names models at will."""

_RETRY_S = 30.0
"""Pause before a tier that could not be opened is tried again."""

_KINDS = ("store", "lookup", "load")


class _Layout(NamedTuple):
    """What distinguishes the objects of one tier from those of others."""

    model: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    size_bytes: int

    @classmethod
    def of(cls, model: str, shapes: Sequence[Any], dtypes: Sequence[Any]) -> _Layout:
        size_bytes = sum(shape.numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))
        return cls(model, tuple(tuple(map(int, shape)) for shape in shapes), tuple(map(str, dtypes)), size_bytes)


class KVStoreL2Adapter(L2AdapterInterface):
    """Keeps LMCache's objects in tiers of kvstore, one per model and layout of objects.

    All methods may be called on any thread. Nothing raises after the constructor: a failure is a miss.

    Args:
        params: ``adapter_params`` of the plugin: ``{"tier": {...}}``, a tier as in ``secondary_tiers``.
        options: Further arguments of LMCache's factory; unused.

    Raises:
        ConfigError: The parameters can't be used.
    """

    def __init__(self, params: Mapping[str, Any], **options: Any) -> None:
        super().__init__()
        unknown = sorted(set(params) - {"tier"})
        if unknown or not isinstance(params.get("tier"), dict):
            raise ConfigError(
                f'The parameters of the adapter are {sorted(params)}. Expected "tier" alone, the object of a tier, '
                'such as {"type": "file", "path": "/mnt/nvme0/kv", "capacity": "1TiB"}. Correct "adapter_params" of '
                "--l2-adapter."
            )
        self._config: dict[str, Any] = params["tier"]
        check_threaded_tier(self._config)
        self._notifiers = {kind: create_event_notifier() for kind in _KINDS}
        # Lookups and loads have their own threads: a request waits for them, and for no store.
        stores, loads = (ThreadPoolExecutor(_WORKERS, f"kvstore-lmcache-{name}") for name in ("stores", "loads"))
        self._workers = {"store": stores, "lookup": loads, "load": loads}
        self._lock = threading.Lock()
        self._last_task = 0
        self._closed = False
        self._done: dict[str, dict[int, Any]] = {kind: {} for kind in _KINDS}
        self._spaces: dict[_Layout, _Space] = {}
        self._retry_at: dict[_Layout, float] = {}  # Earliest next attempt to open a tier, monotonic seconds.
        self._opening = threading.Lock()
        self._impossible_keys = 0

    def get_store_event_fd(self) -> int:
        return int(self._notifiers["store"].fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._notifiers["lookup"].fileno())

    def get_load_event_fd(self) -> int:
        return int(self._notifiers["load"].fileno())

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Store objects; the task succeeds if the medium holds all of them."""
        return self._start("store", L2StoreResult(False, 0), lambda: self._store(keys, objects))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        with self._lock:
            done, self._done["store"] = self._done["store"], {}
        return done

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: Mapping[int, Any]) -> int:
        """Look up objects. Nothing is locked: a later load of an object that was evicted meanwhile is a miss."""
        return self._start("lookup", Bitmap(len(keys)), lambda: self._look_up(keys, group_layout_descs))

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        with self._lock:
            return self._done["lookup"].pop(task_id, None)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Do nothing, as nothing is locked."""

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Load objects; only verified bytes are copied into them."""
        return self._start("load", Bitmap(len(keys)), lambda: self._load(keys, objects))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        with self._lock:
            return self._done["load"].pop(task_id, None)

    def delete(self, keys: list[Any]) -> None:
        """Remove objects of every known layout of their model."""
        named = [(key, name) for key, name in zip(keys, self._names(keys), strict=True) if name is not None]
        for layout, space in list(self._spaces.items()):
            theirs = [(key, name) for key, name in named if key.model_name == layout.model]
            space.tier.remove([name for _, name in theirs])
            if theirs:
                self._notify_keys_deleted([key for key, _ in theirs], [layout.size_bytes] * len(theirs))

    def get_usage(self) -> AdapterUsage:
        """Return the bytes on the medium. Their limit is the tier's ``capacity``, which kvstore itself enforces."""
        used = sum(space.tier.stats().used_bytes for space in list(self._spaces.values()))
        return AdapterUsage(total_bytes_used=used, total_capacity_bytes=0)

    def report_status(self) -> dict[str, Any]:
        tiers = [space.tier.stats() for space in list(self._spaces.values())]
        return {
            "is_healthy": all(stats.ready for stats in tiers),
            "type": type(self).__name__,
            "tiers": [
                {"name": stats.name, "ready": stats.ready, "blocks": stats.blocks, "last_error": stats.last_error}
                for stats in tiers
            ],
        }

    def close(self) -> None:
        """End the tasks, and close the tiers and descriptors."""
        for pool in self._workers.values():
            pool.shutdown(wait=True, cancel_futures=True)
        for space in list(self._spaces.values()):
            space.close()
        with self._lock:
            self._closed = True
            for notifier in self._notifiers.values():
                notifier.close()

    def _start(self, kind: str, failure: Any, work: Callable[[], Any]) -> int:
        with self._lock:
            self._last_task = task_id = self._last_task + 1

        def report(task: Future[Any]) -> None:
            result = failure
            # A close cancels the tasks that have not begun.
            if not task.cancelled() and (error := task.exception()) is not None:
                # LMCache waits for each task, and whatever fails here is a miss.
                logger.error("LMCache's %s task failed; its objects count as missing", kind, exc_info=error)
            elif not task.cancelled():
                result = task.result()
            with self._lock:
                self._done[kind][task_id] = result
                if not self._closed:
                    self._notifiers[kind].notify()

        try:
            task = self._workers[kind].submit(work)
        except RuntimeError:  # The adapter is closed.
            task = Future()
            task.cancel()
        task.add_done_callback(report)
        return task_id

    def _store(self, keys: Sequence[Any], objects: Sequence[Any]) -> L2StoreResult:
        layouts = [_layout_of(key, each) for key, each in zip(keys, objects, strict=True)]
        stored: list[int] = []
        for space, chosen, names in self._by_space(keys, layouts):
            answers = space.store(names, [_bytes_of(objects[i]) for i in chosen])
            stored += [i for i, good in zip(chosen, answers, strict=True) if good]
        sizes = [layouts[i].size_bytes for i in stored]
        if stored:
            self._notify_keys_stored([keys[i] for i in stored], sizes)
        return L2StoreResult(len(stored) == len(keys), sum(sizes))

    def _look_up(self, keys: Sequence[Any], descriptions: Mapping[int, Any]) -> Bitmap:
        layouts = [
            _Layout.of(key.model_name, description.shapes, description.dtypes) if description is not None else None
            for key in keys
            for description in [descriptions.get(key.object_group_id)]
        ]
        return self._found(keys, layouts, lambda space, _, names: space.tier.lookup(names))

    def _load(self, keys: Sequence[Any], objects: Sequence[Any]) -> Bitmap:
        layouts = [_layout_of(key, each) for key, each in zip(keys, objects, strict=True)]

        def load(space: _Space, chosen: Sequence[int], names: Sequence[bytes]) -> list[bool]:
            return space.load(names, [_bytes_of(objects[i]) for i in chosen])

        return self._found(keys, layouts, load)

    def _found(
        self,
        keys: Sequence[Any],
        layouts: Sequence[_Layout | None],
        ask: Callable[[_Space, Sequence[int], Sequence[bytes]], Sequence[bool]],
    ) -> Bitmap:
        found = Bitmap(len(keys))
        good = [
            i
            for space, chosen, names in self._by_space(keys, layouts)
            for i, yes in zip(chosen, ask(space, chosen, names), strict=True)
            if yes
        ]
        for i in good:
            found.set(i)
        if good:
            self._notify_keys_accessed([keys[i] for i in good])
        return found

    def _by_space(
        self, keys: Sequence[Any], layouts: Sequence[_Layout | None]
    ) -> list[tuple[_Space, list[int], list[bytes]]]:
        """Return positions and names of blocks by the tier of their layout.

        Keys without a name, and layouts without a tier, are left out.
        """
        chosen: dict[_Layout, list[tuple[int, bytes]]] = {}
        for i, (layout, name) in enumerate(zip(layouts, self._names(keys), strict=True)):
            if layout is not None and name is not None:
                chosen.setdefault(layout, []).append((i, name))
        return [
            (space, [i for i, _ in where], [name for _, name in where])
            for layout, where in chosen.items()
            if (space := self._space(layout)) is not None
        ]

    def _names(self, keys: Sequence[Any]) -> list[bytes | None]:
        """Return the names of blocks; None, with an error in the log, for keys that have none."""
        names: list[bytes | None] = []
        for key in keys:
            try:
                names.append(_block_key(key))
            except (AttributeError, TypeError, ValueError, OverflowError) as error:
                names.append(None)
                level = logging.DEBUG if self._impossible_keys else logging.ERROR
                # Without the key: it may contain a user's salt.
                logger.log(level, "An object of LMCache is not cached, because of its key: %s", type(error).__name__)
                self._impossible_keys += 1
        return names

    def _space(self, layout: _Layout) -> _Space | None:
        """Return the tier of a layout, opened at the first use; None, with an error in the log, if that fails."""
        space = self._spaces.get(layout)
        if space is None and self._retry_at.get(layout, 0.0) <= time.monotonic():
            with self._opening:
                space = self._spaces.get(layout) or self._opened(layout)
        return space

    def _opened(self, layout: _Layout) -> _Space | None:
        try:
            if len(self._spaces) >= _LAYOUTS_MAX:
                raise ConfigError(
                    f"{_LAYOUTS_MAX} tiers are in use. Expected at most one per model and group of layers. Restart "
                    "LMCache's server if its models have changed."
                )
            space = self._spaces[layout] = _Space(layout, self._config)
        except (KVStoreError, OSError) as error:
            logger.error("Objects of the model %r are not cached: %s", layout.model, error)
            if len(self._retry_at) >= _LAYOUTS_MAX:
                self._retry_at.clear()
            self._retry_at[layout] = time.monotonic() + _RETRY_S
            return None
        return space


class _Space:
    """The tier of one layout, and its staging rows."""

    def __init__(self, layout: _Layout, config: Mapping[str, Any]) -> None:
        size_bytes = layout.size_bytes
        if not layout.model or size_bytes < 1:
            raise ConfigError(
                f"An object of the model {layout.model!r} with {size_bytes} bytes. Expected a name and bytes."
            )
        if "torch.uint8" in layout.dtypes and not config.get("namespace"):
            raise ConfigError(
                "The elements are of type torch.uint8. Expected a type that tells one kind of FP8 from another. Name "
                'the kind in the tier\'s option "namespace", such as "fp8_e4m3".'
            )
        rows = max(2, min(_ROWS_MAX, _STAGING_BYTES // size_bytes))
        # In huge pages, and in rows of whole pages, which a drive fills without a copy.
        self._region = Region.create(rows, rounded_up(size_bytes), name="kvstore-lmcache", populate=True)
        self._rows = self._region.rows()[:, :size_bytes]
        self._free = list(range(rows))
        self._freed = threading.Condition()
        fields = {
            "engine": "lmcache",
            "model": layout.model,
            "shapes": [list(shape) for shape in layout.shapes],
            "dtypes": list(layout.dtypes),
        }
        try:
            memory, row_bytes = self._region.view(), self._region.slot_bytes
            self.tier = ThreadedTier(config, primary=memory, slot_bytes=row_bytes, namespace=Namespace(fields))
        except BaseException:
            self._release()
            raise

    def store(self, keys: Sequence[bytes], sources: Sequence[Any]) -> list[bool]:
        """Copy objects into staging rows, and store them."""

        def move(slots: Sequence[int], part: slice) -> list[bool]:
            for slot, source in zip(slots, sources[part], strict=True):
                self._rows[slot] = source
            return self.tier.store(keys[part], slots)

        return self._in_parts(len(keys), move)

    def load(self, keys: Sequence[bytes], targets: Sequence[Any]) -> list[bool]:
        """Load objects into staging rows, and copy the verified ones."""

        def move(slots: Sequence[int], part: slice) -> list[bool]:
            answers = self.tier.load(keys[part], slots)
            for slot, target, good in zip(slots, targets[part], answers, strict=True):
                if good:
                    target[:] = self._rows[slot]
            return answers

        return self._in_parts(len(keys), move)

    def close(self) -> None:
        self.tier.close()
        self._release()

    def _release(self) -> None:
        del self._rows
        self._region.close()

    def _in_parts(self, count: int, move: Callable[[Sequence[int], slice], list[bool]]) -> list[bool]:
        """Move blocks, as many at a time as rows are free."""
        answers: list[bool] = []
        while len(answers) < count:
            with self._freed:
                self._freed.wait_for(lambda: self._free)
                # At most half of the rows: a long task leaves some to others.
                slots = self._free[: min(count - len(answers), max(1, len(self._rows) // 2))]
                del self._free[: len(slots)]
            try:
                answers += move(slots, slice(len(answers), len(answers) + len(slots)))
            finally:
                with self._freed:
                    self._free += slots
                    self._freed.notify_all()
        return answers


def _layout_of(key: Any, item: Any) -> _Layout:
    about = item.metadata  # Objects of a single tensor may have no lists.
    return _Layout.of(key.model_name, about.shapes or [about.shape], about.dtypes or [about.dtype])


def _bytes_of(item: Any) -> Any:
    return np.frombuffer(item.byte_array, np.uint8)


def _block_key(key: Any) -> bytes:
    """Return the block's key: rank and size of the parallel group, group of layers, salt of the user, and tokens."""
    fixed = key.kv_rank.to_bytes(8, "big") + key.object_group_id.to_bytes(8, "big")
    salt = hashlib.sha256(key.cache_salt.encode()).digest()
    return hashlib.sha256(fixed + salt + key.chunk_hash).digest()
