"""R21: bad configuration, keys, names, headers and server answers give a clear error and nothing else.

Method: the hand-made bad inputs of the suite; R22 has the generated ones.
"""

from __future__ import annotations

from tests.campaign.program import run_tests

if __name__ == "__main__":
    run_tests(
        "tests/test_config.py",
        "tests/test_registry.py",
        "tests/test_quantity.py",
        "tests/codec/test_hostile.py",
        "tests/redis/test_hostile.py",
        "tests/redis/test_resp.py",
        "tests/s3/test_http.py",
        "tests/s3/test_texts.py",
        "tests/peer/test_protocol.py",
        "tests/peer/test_config.py",
    )
