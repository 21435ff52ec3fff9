"""R12: calls on the scheduler thread return while media hang.

Method: frozen ext4, stalled system calls, a stopped I/O process, S3 that does not answer. Latency is not measured.
"""

from __future__ import annotations

from tests.campaign.program import run_tests

if __name__ == "__main__":
    run_tests(
        "tests/disk/test_frozen.py",
        "tests/disk/test_errors.py::test_the_loop_goes_on_while_the_disk_stalls",
        "tests/s3/test_faults.py::test_jobs_end_at_their_deadline",
        "tests/runtime/test_process.py",
    )
