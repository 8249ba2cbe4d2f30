"""The pages of the supervisor: metrics in one answer, and what one worker does to the whole."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from metamq.broker.process.pages import BAD, GOOD, Page
from metamq.broker.workers.pages import health, merged, readiness, table
from metamq.broker.workers.worker import WorkerState

A, B = "# HELP a A text\n# TYPE a gauge\n", "# HELP b_total B\n# TYPE b_total counter\n"
FIRST = f'{A}a{{broker="0"}} 1.0\n{B}b_total{{broker="0"}} 2.0\n'
SECOND = f'{B}b_total{{broker="1"}} 3.0\n{A}a{{broker="1"}} 4.0\n'
SERVING = WorkerState(0, "serving", 11, "h:1", 1)
WAITING = WorkerState(1, "starts again 4 s after its end", starts=3, last_end="was ended by <SIGKILL>")


def test_the_samples_of_a_family_are_together_below_one_head() -> None:
    text = merged([FIRST, SECOND])
    assert text.splitlines() == [
        "# HELP a A text",
        "# TYPE a gauge",
        'a{broker="0"} 1.0',
        'a{broker="1"} 4.0',
        "# HELP b_total B",
        "# TYPE b_total counter",
        'b_total{broker="0"} 2.0',
        'b_total{broker="1"} 3.0',
    ]
    read = {family.name: len(family.samples) for family in text_string_to_metric_families(text)}
    assert read == {"a": 2, "b": 2}
    assert merged([FIRST]) == FIRST
    assert merged([]) == ""


def test_a_line_separator_of_unicode_in_a_label_ends_no_line() -> None:
    text = FIRST.replace('broker="0"', 'broker="0\u2028"')
    assert merged([text]) == text


def test_a_worker_that_starts_again_is_healthy_and_not_ready() -> None:
    pages = [Page.text(GOOD, "fine"), None]
    assert health([SERVING, WAITING], pages).status == GOOD
    page = readiness([SERVING, WAITING], pages)
    assert page.status == BAD
    assert page.body.decode().splitlines() == [
        "broker 0: fine",
        "broker 1: starts again 4 s after its end (was ended by <SIGKILL>)",
    ]


def test_a_worker_that_has_ended_for_good_does_not_count() -> None:
    ended = WorkerState(1, "ended", starts=1, last_end="ended with status 76")
    page = readiness([SERVING, ended], [Page.text(GOOD, "ready"), None])
    assert (page.status, page.body) == (GOOD, b"broker 0: ready\n")
    assert readiness([ended], [None]).status == BAD


def test_a_worker_that_serves_and_does_not_answer_is_neither() -> None:
    assert health([SERVING], [None]).status == BAD
    assert readiness([SERVING], [None]).body == b"broker 0: it does not answer\n"
    assert health([SERVING], [Page.text(BAD, "it hangs")]).status == BAD
    assert readiness([SERVING], [Page.text(GOOD, "ready")]).status == GOOD


def test_the_table_escapes_what_it_shows() -> None:
    shown = table([WAITING], [None])
    assert "<td>1<td>starts again 4 s after its end<td><td><td>3<td>was ended by &lt;SIGKILL&gt;" in shown
