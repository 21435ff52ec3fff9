"""R24: with a seal no forged record is accepted.

Method: bodies swapped between keys, records replayed from other namespaces and keys, bits flipped, lengths changed.
"""

from __future__ import annotations

from tests.campaign.program import run_tests

if __name__ == "__main__":
    run_tests(
        "tests/seal/test_forgeries.py",
    )
