"""``kvstore-bench``: measures tiers, replays traces, and reports. Only :mod:`kvstore.cli.app` imports it."""
