"""R26: no secret appears in logs, errors, representations or metrics.

Method: canaries as secrets, all loggers at DEBUG, failures induced.
"""

from __future__ import annotations

from tests.campaign.program import run_tests

if __name__ == "__main__":
    run_tests(
        "tests/s3/test_secrets.py",
        "tests/test_secret.py",
        "tests/redis/test_config.py",
        "tests/peer/test_config.py",
    )
