"""R28: nothing in the package runs data as code.

Method: the syntax-tree gate of tests/project. Bandit and pip-audit are not part of it.
"""

from __future__ import annotations

from tests.campaign.program import run_tests

if __name__ == "__main__":
    run_tests(
        "tests/project/test_code_rules.py",
    )
