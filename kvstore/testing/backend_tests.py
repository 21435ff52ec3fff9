"""The contract of a backend as a test suite, to be subclassed."""

from __future__ import annotations

from kvstore.testing.backend_concurrency import BackendConcurrencyTests
from kvstore.testing.backend_lifecycle import BackendLifecycleTests
from kvstore.testing.backend_values import BackendValueTests

__all__ = ["BackendTests"]


class BackendTests(BackendValueTests, BackendLifecycleTests, BackendConcurrencyTests):
    """What every backend has to do, in about thirty tests; yours too.

    Subclass it in a module of your tests under a name that pytest collects, and say how to make your backend::

        class TestMyBackend(BackendTests):
            async def make_backend(self) -> Backend:
                return MyBackend(MyConfig(url="…"))

    That is enough for a start. Override what else applies, so that more is checked: ``reopen`` if blocks outlive a
    ``close``, ``make_small_backend`` if there is a capacity, ``break_medium`` and ``mend_medium`` if the test can make
    the medium fail; set ``scans`` or ``deletes`` to False for what your medium can't do. A test whose subject a
    backend doesn't have passes.

    Plain pytest runs it; no plugin is needed. Fixtures, such as ``tmp_path``, come in by an autouse fixture of the
    subclass that stores them on ``self``. A failure names the seed that repeats it.
    """
