"""R5: every field that changes the bytes of blocks changes the namespace.

Method: single-field changes of real vLLM configurations, with the issues of vLLM and LMCache by name.
"""

from __future__ import annotations

from tests.campaign.program import run_tests

if __name__ == "__main__":
    run_tests(
        "tests/test_namespace.py",
        "tests/vllm/test_namespace.py",
    )
