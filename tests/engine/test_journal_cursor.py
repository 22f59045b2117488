"""The journal's rules as a state machine: what comes next, which call gets it, and what may begin. No event loop is involved."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeAlias

import pytest
from msgspec.structs import replace

from perdure.body.journal_cursor import STARTED_TOGETHER, AskingCall, JournalCursor
from perdure.errors import COMPENSATION_PREFIX
from perdure.model.journal import Entry, Kind, Phase

Cursor: TypeAlias = JournalCursor[AskingCall]


def entry(seq: int, key: str, phase: Phase = "close", kind: Kind = "step") -> Entry:
    return Entry(seq=seq, key=key, phase=phase, kind=kind, started_at=seq * 10, ended_at=seq * 10)


def replaying(*entries: Entry, owed: Collection[int] | None = None, retired: Collection[str] = ()) -> Cursor:
    """Return the cursor of a stored run with this journal. Unchanged code asks for all of it unless `owed` says otherwise."""
    return JournalCursor(entries, owed={each.seq for each in entries} if owed is None else owed, retired=retired)


def ask(cursor: Cursor, *keys: str, kind: Kind = "step") -> list[AskingCall]:
    calls = [AskingCall(key, kind) for key in keys]
    for call in calls:
        cursor.ask(call)
    return calls


def delivered(cursor: Cursor) -> list[str]:
    """Return the keys of what reaches the body from now on, passing over nothing."""
    found: list[str] = []
    while (following := cursor.look()).what == "deliver":
        assert following.call is not None
        found.append(following.call.key.partition("\0")[0])
    return found


def record(cursor: Cursor, recorded: Entry, *, is_acknowledged: bool = True) -> None:
    cursor.append(recorded)
    if is_acknowledged:
        cursor.acknowledged = recorded.seq


# What is delivered.


def test_entries_reach_their_calls_in_the_order_of_the_journal_whatever_the_order_of_the_calls() -> None:
    cursor = replaying(entry(1, "a"), entry(2, "b"), entry(3, "c"))
    ask(cursor, "c", "a", "b")
    cursor.settle()
    assert delivered(cursor) == ["a", "b", "c"]
    assert cursor.look().what == "used up"


def test_an_entry_that_nobody_asks_for_keeps_back_those_after_it() -> None:
    cursor = replaying(entry(1, "a"), entry(2, "b"))
    ask(cursor, "b")
    cursor.settle()
    found = cursor.look()
    assert (found.what, found.entry and found.entry.key) == ("unasked", "a")


def test_an_entry_is_delivered_once_the_store_has_acknowledged_it_and_not_before() -> None:
    cursor = replaying()
    ask(cursor, "a")
    cursor.settle()
    record(cursor, entry(1, "a"), is_acknowledged=False)
    assert cursor.look().what == "unacknowledged"
    cursor.acknowledged = 1
    assert delivered(cursor) == ["a"]


def test_without_a_store_an_entry_is_delivered_at_once() -> None:
    cursor: Cursor = JournalCursor((), has_store=False)
    ask(cursor, "a")
    cursor.settle()
    record(cursor, entry(1, "a"), is_acknowledged=False)
    cursor.acknowledged = max(cursor.acknowledged, 0)
    assert delivered(cursor) == ["a"]


def test_delivering_moves_the_time_of_the_body_and_never_back() -> None:
    late = entry(5, "a")
    cursor = replaying(late, Entry(seq=6, key="b", ended_at=1))
    ask(cursor, "a", "b")
    cursor.settle()
    assert delivered(cursor) == ["a", "b"]
    assert (cursor.last_at, cursor.last_seq) == (50, 6)


@pytest.mark.parametrize("kind", ["timer", "cancel"])
def test_a_timer_and_the_cancellation_of_the_run_wait_until_they_are_taken(kind: Kind) -> None:
    cursor = replaying(entry(1, "x", kind=kind), entry(2, "a"))
    ask(cursor, "a")
    cursor.settle()
    assert cursor.look().what == {"timer": "timer", "cancel": "cancellation"}[kind]
    assert cursor.take_next() == 10
    assert cursor.last_seq == 1
    assert delivered(cursor) == ["a"]


# The fast path.


def prepare_nothing(cursor: Cursor) -> None:
    """Leave it as it is."""


def prepare_waiting(cursor: Cursor) -> None:
    ask(cursor, "other")
    cursor.settle()


def prepare_unsettled_then_withdrawn(cursor: Cursor) -> None:
    (call,) = ask(cursor, "other")
    cursor.withdraw(call)


def prepare_unacknowledged(cursor: Cursor) -> None:
    cursor.acknowledged = 0


def prepare_passed_over(cursor: Cursor) -> None:
    cursor.entries.appendleft(entry(0, "gone"))
    cursor.pass_over()


@pytest.mark.parametrize(
    ("journal", "prepare", "is_next"),
    [
        (entry(1, "a"), prepare_nothing, True),
        (entry(1, "b"), prepare_nothing, False),
        (entry(1, "a", "open"), prepare_nothing, False),
        (entry(1, "a", "cancel"), prepare_nothing, False),
        (entry(1, "a"), prepare_waiting, False),
        (entry(1, "a"), prepare_unsettled_then_withdrawn, False),
        (entry(1, "a"), prepare_unacknowledged, False),
        (entry(1, "a"), prepare_passed_over, False),
    ],
    ids=["own", "other", "opening", "cancelled", "waiting", "unsettled", "unacknowledged", "passed over"],
)
def test_a_result_is_next_if_nothing_else_could_come_before_it(
    journal: Entry, prepare: Callable[[Cursor], None], is_next: bool
) -> None:
    cursor = replaying(journal)
    prepare(cursor)
    assert cursor.is_next("a") is is_next


def test_taking_the_next_entry_counts_as_a_call() -> None:
    cursor = replaying(entry(1, "a"), entry(2, "b"))
    cursor.take()
    ask(cursor, "b")
    assert cursor.calls_made == 2


# From asking to starting.


def test_a_call_is_settled_at_the_next_rest_and_started_in_the_order_of_the_calls() -> None:
    cursor = replaying()
    first, second = ask(cursor, "b", "a")
    assert cursor.take_settled() == []
    assert cursor.has_unstarted
    cursor.settle()
    assert first.is_settled
    assert cursor.has_unstarted
    assert cursor.take_settled() == [first, second]
    assert cursor.take_settled() == []
    assert not cursor.has_unstarted


def test_a_few_calls_are_started_at_a_time() -> None:
    cursor = replaying()
    calls = ask(cursor, *(f"{number}" for number in range(STARTED_TOGETHER + 1)))
    cursor.settle()
    assert cursor.take_settled() == calls[:-1]
    assert cursor.take_settled() == calls[-1:]
    assert cursor.take_settled() == []


def test_a_call_that_was_withdrawn_before_it_was_settled_never_is() -> None:
    cursor = replaying()
    (call,) = ask(cursor, "a")
    cursor.withdraw(call)
    cursor.settle()
    assert not call.is_settled
    assert cursor.take_settled() == []
    assert cursor.asked == {}


def test_a_settled_call_that_is_withdrawn_is_not_started() -> None:
    cursor = replaying()
    (call,) = ask(cursor, "a")
    cursor.settle()
    cursor.withdraw(call)
    assert cursor.take_settled() == []


def test_a_call_whose_entry_was_delivered_is_not_started() -> None:
    cursor = replaying(entry(1, "a"))
    ask(cursor, "a")
    cursor.settle()
    assert delivered(cursor) == ["a"]
    assert cursor.take_settled() == []


# Openings.


def test_what_was_begun_goes_to_its_call_without_reaching_the_body() -> None:
    cursor = replaying(entry(1, "a", "open"), entry(2, "a"))
    (call,) = ask(cursor, "a")
    cursor.settle()
    assert delivered(cursor) == ["a"]
    assert [opening.seq for opening in call.opened] == [1]


def test_what_was_begun_twice_under_a_key_goes_to_the_calls_in_their_order() -> None:
    """The first call was given up after it had begun; its key was used again."""
    cursor = replaying(entry(1, "a", "open", "sleep"), entry(2, "a", "cancel", "sleep"), entry(3, "a", "open", "sleep"))
    (first,) = ask(cursor, "a", kind="sleep")
    cursor.settle()
    cursor.withdraw(first)
    (second,) = ask(cursor, "a", kind="sleep")
    cursor.settle()
    assert cursor.look().what == "used up"
    assert [opening.seq for opening in first.opened] == [1]
    assert [opening.seq for opening in second.opened] == [3]


def test_a_call_that_is_tried_again_gets_every_opening() -> None:
    cursor = replaying(entry(1, "a", "open"), entry(2, "a", "open"), entry(3, "a"))
    (call,) = ask(cursor, "a")
    cursor.settle()
    assert delivered(cursor) == ["a"]
    assert [opening.seq for opening in call.opened] == [1, 2]
    assert cursor.openings["a"].seq == 2


def test_an_opening_without_a_call_is_waited_for() -> None:
    cursor = replaying(entry(1, "a", "open"))
    assert cursor.look().what == "unasked"


# Cancellations.


def test_the_cancellation_of_a_step_is_delivered_to_the_call_that_waits_for_it() -> None:
    cursor = replaying(entry(1, "a", "cancel"))
    (call,) = ask(cursor, "a")
    cursor.settle()
    assert cursor.look().what == "unasked"  # the body has not cancelled it yet
    call.is_cancelled = True
    assert delivered(cursor) == ["a"]


def test_the_cancellation_of_a_wait_that_was_withdrawn_is_passed() -> None:
    cursor = replaying(entry(1, "a", "cancel", "sleep"), entry(2, "b"))
    (call,) = ask(cursor, "a", kind="sleep")
    cursor.settle()
    assert cursor.look().what == "unasked"  # the body still waits
    cursor.withdraw(call)
    ask(cursor, "b")
    assert delivered(cursor) == ["b"]


def test_a_wait_that_was_withdrawn_once_accounts_for_one_cancellation() -> None:
    cursor = replaying(entry(1, "a", "cancel", "sleep"), entry(2, "a", "cancel", "sleep"))
    (call,) = ask(cursor, "a", kind="sleep")
    cursor.settle()
    cursor.withdraw(call)
    found = cursor.look()
    assert (found.what, found.entry and found.entry.seq) == ("unasked", 2)


def test_a_wait_that_was_withdrawn_before_it_began_accounts_for_none() -> None:
    cursor = replaying(entry(1, "a", "cancel", "sleep"))
    (call,) = ask(cursor, "a", kind="sleep")
    cursor.withdraw(call)
    assert cursor.look().what == "unasked"


def test_withdrawing_a_call_does_not_withdraw_the_next_one_of_its_key() -> None:
    cursor = replaying(entry(1, "a"))
    (first,) = ask(cursor, "a")
    cursor.withdraw(first)
    (second,) = ask(cursor, "a")
    cursor.withdraw(first)
    cursor.settle()
    found = cursor.look()
    assert (found.what, found.call) == ("deliver", second)


def test_what_was_begun_under_a_key_that_was_cancelled_before_goes_to_the_later_call() -> None:
    cursor = replaying(entry(1, "a", "cancel"), entry(2, "a", "open"))
    (first,) = ask(cursor, "a")
    cursor.settle()
    first.is_cancelled = True
    assert delivered(cursor) == ["a"]
    (second,) = ask(cursor, "a")
    cursor.settle()
    assert cursor.look().what == "used up"
    assert (len(first.opened), len(second.opened)) == (0, 1)


# What is passed over, and what is missing.


def test_what_was_passed_over_is_delivered_when_it_is_asked_for_after_all() -> None:
    cursor = replaying(entry(1, "a"), entry(2, "b"))
    cursor.pass_over()
    assert cursor.missing_keys() == ["a"]
    ask(cursor, "a", "b")
    assert cursor.missing_keys() == []
    cursor.settle()
    assert delivered(cursor) == ["a", "b"]


def test_of_what_was_passed_over_the_earliest_is_delivered_first() -> None:
    cursor = replaying(entry(1, "a"), entry(2, "b"))
    cursor.pass_over()
    cursor.pass_over()
    ask(cursor, "b", "a")
    cursor.settle()
    assert delivered(cursor) == ["a", "b"]


def test_what_was_begun_and_passed_over_goes_to_a_call_that_asks_late() -> None:
    cursor = replaying(entry(1, "a", "open"), entry(2, "a"))
    cursor.pass_over()
    cursor.pass_over()
    (call,) = ask(cursor, "a")
    cursor.settle()
    assert delivered(cursor) == ["a"]
    assert [opening.seq for opening in call.opened] == [1]


def test_a_call_that_is_to_get_what_was_passed_over_does_not_start() -> None:
    cursor = replaying(entry(1, "a"))
    cursor.pass_over()
    ask(cursor, "a")
    cursor.settle()
    assert cursor.take_settled() == []


def test_while_something_is_missing_new_calls_are_kept_back_and_known_ones_start() -> None:
    cursor = replaying(entry(1, "begun", "open"), entry(2, "gone"), owed={2})
    known, new = ask(cursor, "begun", "new")
    cursor.settle()
    assert cursor.look().what == "unasked"
    cursor.pass_over()
    assert cursor.take_settled() == [known]
    assert cursor.new_call() is new


def test_a_cancelled_call_ends_although_something_is_missing() -> None:
    cursor = replaying(entry(1, "gone"))
    (call,) = ask(cursor, "new")
    call.is_cancelled = True
    cursor.settle()
    cursor.pass_over()
    assert cursor.new_call() is None
    assert cursor.take_settled() == [call]


@pytest.mark.parametrize(
    ("passed", "owed", "retired", "is_missing"),
    [
        (entry(1, "a"), {1}, (), True),
        (entry(1, "a"), (), (), False),
        (entry(1, "a"), {1}, ("a",), False),
        (Entry(seq=1, key="a:2", name="a"), {1}, ("a",), False),
        (entry(1, "a", "cancel"), {1}, (), False),
        (entry(1, "a", kind="timer"), {1}, (), False),
        (entry(1, "a", "open"), {1}, (), True),
        (entry(1, "a", "open", "child"), {1}, (), True),
        (entry(1, "a", "open", "sleep"), {1}, (), False),
    ],
    ids=["result", "not owed", "retired key", "retired name", "cancelled", "timer", "begun step", "begun child", "begun wait"],
)
def test_what_nobody_asks_for_is_missing_if_unchanged_code_would_have_asked(
    passed: Entry, owed: Collection[int], retired: Collection[str], is_missing: bool
) -> None:
    cursor = replaying(passed, owed=owed, retired=retired)
    cursor.pass_over()
    assert cursor.missing_keys() == (["a"] if is_missing else [])


def test_the_result_of_a_call_that_was_withdrawn_is_not_missing() -> None:
    cursor = replaying(entry(1, "a"))
    (call,) = ask(cursor, "a")
    cursor.withdraw(call)
    cursor.pass_over()
    assert cursor.missing_keys() == []


def test_a_wait_that_was_begun_is_missing_once_the_class_of_an_error_is_gone() -> None:
    cursor = replaying(entry(1, "a", "open", "sleep"))
    cursor.owes_waits = True
    cursor.pass_over()
    assert cursor.missing_keys() == ["a"]


@pytest.mark.parametrize("end", ["close", "cancel"])
def test_what_was_begun_and_has_an_end_is_not_missing_by_its_opening(end: Phase) -> None:
    cursor = replaying(entry(1, "a", "open"), entry(2, "a", end))
    cursor.pass_over()
    assert cursor.missing_keys() == []


def test_what_a_map_will_ask_for_later_is_not_missing() -> None:
    cursor = replaying(entry(1, "a"), entry(2, "b"))
    cursor.pass_over()
    cursor.pass_over()
    cursor.expect(lambda: ["b"])
    assert cursor.missing_keys() == ["a"]


def test_at_the_end_of_the_function_what_is_left_is_missing_but_for_compensations() -> None:
    undone = COMPENSATION_PREFIX + "a"
    cursor = replaying(entry(1, "a"), entry(2, undone), entry(3, "t", kind="timer"), entry(4, "b", "open"), entry(5, "c"))
    ask(cursor, "c")
    assert cursor.missing_at_end() == ["a"]


# Calls that share an entry, and entries that change.


def test_calls_that_follow_another_get_its_entry_after_it_in_their_order() -> None:
    cursor = replaying(entry(1, "a"))
    (first,) = ask(cursor, "a")
    followers = ask(cursor, "a\0x", "a\0y")
    for follower in followers:
        cursor.follow(first, follower)
    cursor.settle()
    found = [cursor.look() for _ in range(3)]
    assert [(each.what, each.call) for each in found] == [("deliver", call) for call in (first, *followers)]
    assert cursor.asked == {}
    assert cursor.take_settled() == []


def test_a_follower_that_was_withdrawn_gets_nothing() -> None:
    cursor = replaying(entry(1, "a"))
    (first,) = ask(cursor, "a")
    (follower,) = ask(cursor, "a\0x")
    cursor.follow(first, follower)
    cursor.settle()
    assert cursor.look().call is first
    cursor.withdraw(follower)
    assert cursor.look().what == "used up"


@pytest.mark.parametrize(("phase", "left"), [("close", 1), ("open", 0)])
def test_an_entry_that_the_store_has_replaced_is_an_end_only_if_it_is_a_result(phase: Phase, left: int) -> None:
    cursor = replaying()
    ask(cursor, "a")
    cursor.settle()
    record(cursor, entry(1, "a"), is_acknowledged=False)
    cursor.replace(entry(1, "a", phase))
    assert len(cursor.entries) == left


@pytest.mark.parametrize(
    ("came_again", "is_missing"),
    [
        ([entry(9, "undone")], True),
        ([replace(entry(9, "undone"), payload=b"2")], False),
        ([replace(entry(9, "undone"), ok=False)], False),
        ([entry(9, "other"), entry(10, "undone")], False),
    ],
    ids=["alike", "another value", "a failure", "after something else"],
)
def test_what_came_after_an_undone_result_is_owed_once_that_has_come_again(came_again: list[Entry], is_missing: bool) -> None:
    later = entry(2, "later")
    cursor: Cursor = JournalCursor([later, *came_again], undone_results=[entry(1, "undone")], owed_after=[later])
    ask(cursor, *(each.key for each in came_again))
    cursor.settle()
    assert cursor.look().what == "unasked"
    cursor.pass_over()
    assert cursor.missing_keys() == []
    assert delivered(cursor) == [each.key for each in came_again]
    assert cursor.missing_keys() == (["later"] if is_missing else [])


def test_what_came_after_two_undone_results_waits_for_both_to_come_again() -> None:
    middle, last = entry(2, "middle"), entry(4, "last")
    undone = [entry(1, "first"), entry(3, "second")]
    cursor: Cursor = JournalCursor([entry(8, "first"), entry(9, "second")], undone_results=undone, owed_after=[middle, last])
    ask(cursor, "first", "second")
    cursor.settle()
    for key, expected in (("first", {2}), ("second", {2, 4})):
        assert cursor.look().call is not None, key
        assert cursor._owed_again == expected  # nothing else tells before the journal is used up
