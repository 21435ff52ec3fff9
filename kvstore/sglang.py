"""A HiCache storage backend for SGLang: its pages in a tier of kvstore, through SGLang's ``dynamic`` backend.

SGLang moves pages between the GPU and its host pool, and this backend between the host pool and the medium, without a
copy: a page is one or more rows of the host pool's buffer (keys and values of all layers, or of each layer), and each
row is a block. A page is there if all of its rows are. See docs/sglang.md.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.runtime_context import get_server_args
from sglang.version import __version__ as SGLANG_VERSION

from kvstore.errors import ConfigError
from kvstore.namespace import Namespace
from kvstore.tiers.threaded import ThreadedTier

logger = logging.getLogger("kvstore.sglang")

_CLEAR_S = 30.0
"""Longest wait for a clear, which SGLang calls on its scheduler thread; it continues in the background."""

_SERVER_FIELDS = (
    "model_path",
    "revision",
    "load_format",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "json_model_override_args",
)
"""Arguments of SGLang's server that change the bytes of a page."""


class KVStoreHiCache(HiCacheStorage):
    """Keeps SGLang's pages in one tier of kvstore per host pool.

    Args:
        storage_config: SGLang's configuration; ``extra_config["tier"]`` is the tier, as in ``secondary_tiers``.
        options: Further arguments of SGLang's factory; unused.

    Raises:
        ConfigError: The tier's configuration or the model's identity is missing.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, options: Mapping[str, Any] | None = None) -> None:
        extra = storage_config.extra_config
        if extra is None or not isinstance(extra.get("tier"), dict):
            raise ConfigError(
                f'"tier" is {(extra or {}).get("tier")!r}. Expected the object of a tier, such as '
                '{"type": "file", "path": "/mnt/nvme0/kv", "capacity": "1TiB"}. Add it to '
                "--hicache-storage-backend-extra-config."
            )
        self._tier_config: dict[str, Any] = extra["tier"]
        if not storage_config.model_name and not self._tier_config.get("namespace"):
            raise ConfigError(
                "SGLang gives no model name. Expected one, because pages of two models must never meet. Start SGLang "
                'with --served-model-name, or name the model in the tier\'s option "namespace".'
            )
        # SGLang reads it after this constructor. Its older interface passes single tensors, each of them a copy.
        extra["interface_v1"] = 1
        self._config = storage_config
        self._pools: dict[str, _Pool] = {}

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the tier of the pool of keys and values."""
        super().register_mem_pool_host(mem_pool_host)
        self.register_mem_host_pool_v2(mem_pool_host, PoolName.KV)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Open the tier of a pool, unless it is open."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        known = self._pools.get(name)
        if known is None or known.host is not host_pool:
            if known is not None:
                known.tier.close()
            self._pools[name] = _Pool(host_pool, name, self._config, self._tier_config)

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Return the number of leading pages that are there."""
        return _leading(self._present(PoolName.KV, keys))

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Load pages into the host pool; return which ones are loaded and verified."""
        return self._moved("load", PoolName.KV, keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Store pages of the host pool; return which ones the medium now holds."""
        return self._moved("store", PoolName.KV, keys, host_indices)

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Return the longest prefix that all pools can restore, and each pool's own."""
        longest = _leading(self._present(PoolName.KV, keys))
        found = {PoolName.KV: longest} if longest else {}
        restorable = list(range(1, longest + 1))
        for transfer in pool_transfers or ():
            if not restorable:
                break
            present = self._present(transfer.name, keys[:longest])
            if transfer.hit_policy is PoolHitPolicy.ALL_PAGES:
                lengths = set(range(1, _leading(present) + 1))
            elif transfer.hit_policy is PoolHitPolicy.TRAILING_PAGES:
                window = max(1, len(transfer.keys or ()))
                lengths = {n for n in range(1, longest + 1) if all(present[max(0, n - window) : n])}
            else:
                lengths = set()  # Pages in groups of blocks, which no pool that a tier accepts has.
            if lengths:
                found[transfer.name] = max(lengths)
            restorable = [n for n in restorable if n in lengths]
        return PoolTransferResult(max(restorable, default=0), found, restorable)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {each.name: self._moved("load", each.name, each.keys or [], each.host_indices) for each in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {each.name: self._moved("store", each.name, each.keys or [], each.host_indices) for each in transfers}

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        """Return a miss: SGLang uses ``batch_get_v1``, as the constructor requests."""
        return None

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[None]:
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store nothing: SGLang uses ``batch_set_v1``, as the constructor requests."""
        return False

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        return False

    def clear(self) -> bool:
        """Remove this configuration's pages from the medium; return whether all are gone."""
        return all([pool.tier.clear(_CLEAR_S) for pool in self._pools.values()])

    def close(self) -> None:
        """Close the tiers. SGLang ends its storage threads first."""
        for pool in self._pools.values():
            pool.tier.close()

    def _present(self, name: Any, keys: Sequence[str]) -> list[bool]:
        pool = self._pools.get(str(name))
        if pool is None:
            return [False] * len(keys)
        return pool.by_page(pool.tier.lookup(pool.block_keys(keys)))

    def _moved(self, verb: str, name: Any, keys: Sequence[str], indices: torch.Tensor | None) -> list[bool]:
        pool = self._pools.get(str(name))
        if pool is None or indices is None or indices.numel() != len(keys) * pool.host.page_size:
            logger.warning(
                "Pages of the pool %s were not moved: the pool is unknown, or the indices do not match the keys", name
            )
            return [False] * len(keys)
        move = pool.tier.load if verb == "load" else pool.tier.store
        return pool.by_page(move(pool.block_keys(keys), pool.slots(indices)))


class _Pool:
    """A host pool as the rows of its tier."""

    def __init__(self, host: Any, name: str, config: HiCacheStorageConfig, tier: Mapping[str, Any]) -> None:
        buffer = getattr(host, "kv_buffer", None)
        if not isinstance(buffer, torch.Tensor) or not buffer.is_contiguous() or buffer.device.type != "cpu":
            raise _unfit(host, name, "has no single buffer in CPU memory")
        try:
            pointers, sizes = host.get_page_buffer_meta(torch.arange(host.page_size))
        except (AttributeError, NotImplementedError, ValueError) as error:
            raise _unfit(host, name, f"does not report the addresses of its pages ({error})") from error
        self.host = host
        self._base, self._row_bytes, self._rows = buffer.data_ptr(), int(sizes[0]), len(pointers)
        if len(set(sizes)) != 1 or any((pointer - self._base) % self._row_bytes for pointer in pointers):
            raise _unfit(host, name, f"has pages that are not equal rows of its buffer ({sorted(set(sizes))} bytes)")
        self.tier = ThreadedTier(
            tier,
            primary=buffer.view(-1).view(torch.uint8).numpy(),
            slot_bytes=self._row_bytes,
            namespace=_namespace(host, name, config, self._row_bytes, self._rows, bool(tier.get("namespace"))),
        )

    def block_keys(self, keys: Sequence[str]) -> list[bytes]:
        """Return the keys of the rows of pages."""
        digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        return [digest + row.to_bytes(2, "big") for digest in digests for row in range(self._rows)]

    def slots(self, indices: torch.Tensor) -> list[int]:
        """Return the slots of the rows of pages, given the pages' token indices."""
        pointers, _ = self.host.get_page_buffer_meta(indices)
        return [(pointer - self._base) // self._row_bytes for pointer in pointers]

    def by_page(self, answers: Sequence[bool]) -> list[bool]:
        """Return for each page whether all of its rows succeeded."""
        return [all(answers[start : start + self._rows]) for start in range(0, len(answers), self._rows)]


def _namespace(
    host: Any, name: str, config: HiCacheStorageConfig, row_bytes: int, rows: int, is_named: bool
) -> Namespace:
    """Return the namespace of a pool's pages.

    Raises:
        ConfigError: The type of the elements is unknown.
    """
    try:
        arguments = get_server_args()
    except (AssertionError, AttributeError, LookupError, RuntimeError, ValueError):
        arguments = None
    dtype = str(host.dtype)
    if arguments is None and not is_named and host.dtype.itemsize == 1:
        raise ConfigError(
            f"The pool {name} has elements of type {dtype}, and SGLang's server arguments are not set. Expected them, "
            'because they identify the FP8 format. Set the tier\'s option "namespace" to the format.'
        )
    # Layers of pools without their own are those of the model.
    layers = [getattr(host, "start_layer", None), getattr(host, "end_layer", None), getattr(host, "layer_num", None)]
    fields: dict[str, Any] = {
        "engine": "sglang",
        "version": SGLANG_VERSION,
        "model": config.model_name,
        "pool": name,
        "layout": host.layout,
        "dtype": dtype,
        "page_tokens": host.page_size,
        "row_bytes": row_bytes,
        "rows": rows,
        "layers": layers,
        "heads": [getattr(host, field, None) for field in ("head_num", "head_dim", "v_head_dim")],
        "pp": [config.pp_rank, config.pp_size],
        "cp": [config.attn_cp_rank, config.attn_cp_size],
        "server": {
            field: None if (value := getattr(arguments, field, None)) is None else str(value)
            for field in _SERVER_FIELDS
        },
    }
    # All ranks of an MLA model hold the same pages, and one of them stores them. Mamba's state is sharded always.
    if not config.is_mla_model or name == str(PoolName.MAMBA):
        fields["tp"] = [config.tp_rank, config.tp_size]
    return Namespace(fields)


def _leading(present: Sequence[bool]) -> int:
    return present.index(False) if False in present else len(present)


def _unfit(host: Any, name: str, reason: str) -> ConfigError:
    return ConfigError(
        f"The host pool {name} ({type(host).__name__}, layout {getattr(host, 'layout', None)!r}) {reason}. Expected "
        "pages of equal rows of one buffer. Use --hicache-mem-layout page_first, or page_first_direct with "
        "--hicache-io-backend direct; a model with other kinds of state can't use this backend."
    )
