"""R13: every job is reported by its deadline, whatever the medium does.

Method: the shipped contract suite of tiers, in this process and in the I/O process, on memory and disk; S3 faults.
"""

from __future__ import annotations

from tests.campaign.program import run_tests

if __name__ == "__main__":
    run_tests(
        "tests/contract/test_memory_tier.py",
        "tests/contract/test_process_host.py",
        "tests/disk/test_tier.py",
        "tests/s3/test_faults.py::test_jobs_end_at_their_deadline",
    )
