"""R25: an input that claims to be huge costs no memory.

Method: compressed bombs, records of a claimed GiB, endless Redis values, long HTTP texts, planted snapshots.
"""

from __future__ import annotations

from tests.campaign.program import run_tests

if __name__ == "__main__":
    run_tests(
        "tests/codec/test_hostile.py",
        "tests/codec/test_contract.py",
        "tests/redis/test_hostile.py",
        "tests/redis/test_resp.py",
        "tests/s3/test_http.py",
        "tests/disk/test_recovery.py",
        "-k",
        "bomb or gibibyte or endless or bounded or tiny_chunks or broken_answers or planted_snapshot",
    )
