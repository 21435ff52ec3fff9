"""``python -m kvstore``: the command ``kvstore``; its group ``bench`` is the command ``kvstore-bench``."""

from __future__ import annotations

from kvstore.cli import main

if __name__ == "__main__":
    main()
