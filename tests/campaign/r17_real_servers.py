"""R17: on real servers every answer agrees with a model.

Method: 20,000 mixed operations each on Redis, Valkey, clusters, TLS with ACL; contract suite on SeaweedFS.
"""

from __future__ import annotations

from tests.campaign.program import run_tests

if __name__ == "__main__":
    run_tests(
        "tests/redis/test_operations.py",
        "tests/redis/test_topology.py",
        "tests/s3/test_contract.py",
    )
