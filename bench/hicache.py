"""Store and load prompts by SGLang's controller, and print the seconds that it took; bench/peers.py runs it.

    python -m bench.hicache STORAGE DIRECTORY PROMPTS

``STORAGE`` is "dynamic", for kvstore's disk tier, or a backend of SGLang's own. Each prompt has 24 pages of 256 KiB.
Between storing and loading, the files leave the page cache. Every byte is compared.
"""

from __future__ import annotations

import json
import os
import sys
import time
from array import array
from pathlib import Path

from bench.common import leave_page_cache
from tests.outside.check_sglang import PAGES, TOKENS, check, content, controller, fill, host_pool, load, store

LAYERS = 64


def main() -> None:
    """Store all prompts, then load them; print the bytes and the seconds as JSON, in the last line."""
    storage, directory, prompts = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(directory)
    pool = host_pool(layers=LAYERS)
    sglang = controller(directory, pool, storage)
    seconds = dict.fromkeys(("store", "load"), 0.0)
    try:
        for seed in range(prompts):
            tokens = array("q", [seed, *TOKENS[1:]])
            indices = pool.alloc(len(tokens))
            fill(pool, indices, seed)
            started = time.perf_counter()
            stored = store(sglang, indices, tokens)
            seconds["store"] += time.perf_counter() - started
            pool.free(indices)
            if stored != len(tokens):
                sys.exit(f"{storage} stored {stored} of {len(tokens)} tokens.")
        leave_page_cache(directory)
        for seed in range(prompts):
            started = time.perf_counter()
            found = load(sglang, array("q", [seed, *TOKENS[1:]]))
            seconds["load"] += time.perf_counter() - started
            if found is None or len(found) != len(TOKENS):
                sys.exit(f"{storage} loaded {0 if found is None else len(found)} of {len(TOKENS)} tokens.")
            check(pool, found, seed)
    finally:
        sglang.detach_storage_backend()
    page = content(pool, 0, 0)
    print(json.dumps({"bytes": prompts * PAGES * page.nbytes, "block_bytes": page.nbytes, **seconds}))


if __name__ == "__main__":
    main()
