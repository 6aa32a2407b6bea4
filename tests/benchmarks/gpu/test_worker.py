"""A measure that fails, crashes or hangs is a row of the result, and what comes after it is measured."""

import functools
import time

import pytest

from benchmarks.gpu.worker import Deadline, Row, run_all
from tests.benchmarks.gpu import made_up


def rows_of(*names, libraries=None, limit_s=60.0, seconds=60.0, torch=made_up.about):
    catalog = functools.partial(made_up.catalog, names, libraries or ("jax",) * len(names), limit_s)
    said = list(run_all(catalog, catalog(), {"jax": made_up.about, "torch": torch}, Deadline(seconds)))
    return [row for row in said if isinstance(row, Row)], [about for about in said if not isinstance(about, Row)]


def summary(rows):
    return [(row.measure.name, row.found.case, row.found.failure) for row in rows]


def test_one_process_runs_them_in_turn():
    rows, abouts = rows_of("works", "works")
    assert [row.found.times.median for row in rows] == [2.0, 2.0]
    assert rows[0].found.notes == rows[1].found.notes and rows[0].found.took_s >= 0
    assert abouts == [{"card": "made up"}]


def test_an_error_is_a_row_with_its_words_and_what_came_before_it_stays():
    rows, _ = rows_of("works half", "not implemented", "works")
    assert summary(rows) == [
        ("works half", "first", None),
        ("works half", "", "ValueError: the second is too large"),
        ("not implemented", "", "NotImplementedError: no such kernel"),
        ("works", "", None),
    ]


def test_an_error_at_run_time_costs_its_process_and_others_do_not():
    rows, abouts = rows_of("value error", "works", "runtime error", "works")
    assert [row.found.failure is None for row in rows] == [False, True, False, True]
    assert rows[1].found.notes != rows[3].found.notes, "another process"
    assert len(abouts) == 2


def test_a_crash_is_reported_and_the_next_goes_on():
    rows, _ = rows_of("crashes", "works", "crashes", "crashes", "works")
    ended = "the process ended: exit status 3"
    assert [row.found.failure for row in rows] == [ended, None, ended, ended, None]


def test_one_that_hangs_is_killed_after_its_limit():
    rows, _ = rows_of("hangs", "works", limit_s=0.5)
    assert summary(rows) == [("hangs", "first", None), ("hangs", "0", "no answer in 0.5 s"), ("works", "", None)]


def test_two_sizes_that_hang_leave_out_the_others_of_their_kernel_alone():
    rows, _ = rows_of("hangs", "works", "hangs", "hangs", "works", "hangs", limit_s=0.5)
    silent, left_out = "no answer in 0.5 s", "left out: 2 other sizes gave no answer"
    failures = [(row.measure.name, row.found.failure) for row in rows if row.found.case != "first"]
    assert failures == [("hangs", silent), ("works", None), ("hangs", silent), *[("hangs", left_out)] * 2, ("works", None)]


def test_the_deadline_ends_what_runs_and_leaves_out_the_rest():
    began = time.monotonic()
    rows, _ = rows_of("works", "hangs", "works", "works", seconds=5.0)
    assert time.monotonic() - began < 30
    assert [row.found.failure for row in rows] == [None, None, "no time left", "left out: no time left", "left out: no time left"]


@pytest.mark.parametrize("torch", [made_up.absent, made_up.dies_at_once])
def test_a_library_that_is_not_there_leaves_out_its_measures_alone(torch):
    rows, _ = rows_of("works", "works", "works", "works", libraries=("jax", "torch", "jax", "torch"), torch=torch)
    failures = [row.found.failure for row in rows]
    assert failures[0] is failures[2] is None
    assert failures[1] == failures[3] and failures[1].startswith("absent: ")
    assert "torch" in failures[1] or "exit status 7" in failures[1]


def test_a_deadline_passes():
    now = [5.0]
    deadline = Deadline(10.0, lambda: now[0])
    assert deadline.left() == 10.0
    now[0] = 12.0
    assert deadline.left() == 3.0
    now[0] = 40.0
    assert deadline.left() == 0.0
