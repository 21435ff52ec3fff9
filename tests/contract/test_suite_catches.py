"""The backend suite finds defects of backends: on a broken one, the right check fails."""

from __future__ import annotations

import pytest

from kvstore.errors import BackendError
from tests.contract import broken_backends as broken
from tests.contract.broken_backends import Breakable, SuiteOf
from tests.contract.failures import failure_of

# Each defect, and checks that must all fail for it.
DEFECTS: list[tuple[type[Breakable], list[str]]] = [
    (broken.WritesAfterReturn, ["test_no_buffer_is_written_after_a_cancelled_get"]),
    (broken.ReadsAfterReturn, ["test_no_buffer_is_read_after_a_cancelled_put"]),
    (broken.KeepsBuffers, ["test_buffers_are_the_callers_again_after_a_put"]),
    (broken.WrongBlock, ["test_round_trip_of_all_lengths", "test_keys_of_all_lengths_and_bytes"]),
    (broken.OutcomesInOrderOfCompletion, ["test_each_block_of_a_mixed_batch_has_its_own_outcome"]),
    (broken.LosesABatch, ["test_each_block_of_a_mixed_batch_has_its_own_outcome"]),
    (broken.SaysOKWithoutStoring, ["test_round_trip_of_all_lengths", "test_one_batch_of_many_blocks"]),
    (broken.LastWriterWins, ["test_first_writer_wins"]),
    (broken.MissRaises, ["test_miss_is_a_value"]),
    (broken.OneFailureFailsAll, ["test_each_block_of_a_mixed_batch_has_its_own_outcome"]),
    (broken.NotAtomic, ["test_gets_beside_a_put_see_all_or_nothing"]),
    (broken.CutsKeys, ["test_keys_of_all_lengths_and_bytes"]),
    (broken.ReportsWrongLength, ["test_round_trip_of_all_lengths", "test_a_miss_reports_nothing_filled"]),
    (broken.FillsShortBuffers, ["test_record_longer_than_buffers"]),
    (broken.SecondCloseRaises, ["test_close_is_idempotent"]),
    (broken.UsableAfterClose, ["test_use_outside_of_open_and_close"]),
    (broken.ScanForgets, ["test_scan_yields_every_block_once", "test_blocks_outlive_a_restart"]),
    (broken.ScanRepeats, ["test_scan_yields_every_block_once"]),
    (broken.IgnoresCapacity, ["test_capacity_is_kept"]),
    (broken.EvictsSilently, ["test_capacity_is_kept"]),
    (broken.ReportsWrongCause, ["test_capacity_is_kept"]),
    (broken.EvictsTheHottest, ["test_a_block_in_use_outlives_one_that_is_not"]),
    (broken.IgnoresNamespace, ["test_namespaces_do_not_meet"]),
    (broken.ForgetsAtRestart, ["test_blocks_outlive_a_restart"]),
    (broken.RevivesDeleted, ["test_blocks_outlive_a_restart"]),
    (broken.QuarantineDoesNothing, ["test_quarantined_blocks_are_misses"]),
    (broken.ErrorIsAbsence, ["test_a_medium_that_fails_is_not_an_absent_block"]),
    (broken.RaisesGroups, ["test_a_medium_that_fails_is_not_an_absent_block"]),
    (broken.FailedGetIsAMiss, ["test_a_medium_that_fails_is_not_an_absent_block"]),
    (broken.CountsWrong, ["test_statistics_count_blocks_and_bytes"]),
    (broken.SleepsOnTheLoop, ["test_one_batch_of_many_blocks"]),
    (broken.OpensFilesOnTheLoop, ["test_one_batch_of_many_blocks"]),
    (broken.ConnectsOnTheLoop, ["test_one_batch_of_many_blocks"]),
    (broken.ProbeLeavesTraces, ["test_scan_yields_every_block_once"]),
]


class TestBreakable(SuiteOf):
    """The base of the broken backends has no defect, so that checks find only the added one."""

    kind = Breakable


@pytest.mark.parametrize(
    ("kind", "check"),
    [pytest.param(kind, check, id=f"{kind.__name__}-{check}") for kind, checks in DEFECTS for check in checks],
)
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_suite_finds_the_defect(kind: type[Breakable], check: str) -> None:
    """A backend with a defect fails the matching check, and the failure names the seed."""
    suite = SuiteOf()
    suite.kind = kind
    # Blocks that disappear without notice are waited for until half of this time.
    suite.time_limit_s = 10.0
    error = failure_of(lambda: getattr(suite, check)(), (AssertionError, BackendError))
    assert any("KVSTORE_TEST_SEED=" in note for note in error.__notes__), "the failure does not name its seed"


def test_a_call_that_never_returns_fails_at_the_time_limit() -> None:
    """The failure says which limit was exceeded, and the remedy."""
    suite = SuiteOf()
    suite.kind, suite.time_limit_s = broken.NeverAnswers, 0.2
    with pytest.raises(AssertionError, match=r"longer than 0\.2 s: give each wait for the medium a deadline"):
        suite.test_miss_is_a_value()
