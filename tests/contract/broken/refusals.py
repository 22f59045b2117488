"""Right refusals in other words."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

from perdure.backends.memory.store import MemoryStore
from perdure.errors import PerdureError, StoreCapabilityError
from perdure.testing.contract.capabilities import CORE_VERBS, PART_VERBS
from tests.contract.broken.table import breaks
from tests.contract.broken.transactions import Transactional

PROMISES: Final = (
    "a_closed_store_refuses_every_verb", "a_closed_store_refuses_the_verbs_of_operators",
    "a_closed_store_refuses_the_verbs_of_schedules", "a_closed_store_refuses_the_verbs_of_streams",
    "a_hold_outlasts_a_restore", "a_held_run_waits_for_its_operator", "a_journal_to_begin_with_has_each_seq_once",
    "a_lease_is_alive_until_its_end", "a_lease_superseded_by_claim_cannot_write", "a_live_lease_keeps_a_run_from_being_restored",
    "a_record_has_one_entry_for_each_seq", "a_record_has_one_item_for_each_number",
    "a_restore_that_contradicts_itself_is_refused", "a_restored_inbox_is_consumed_like_any_other",
    "a_restored_run_goes_on_after_its_journal", "a_restored_run_takes_its_input_once",
    "a_restored_run_takes_the_input_of_its_own_workflow", "a_restored_run_that_has_ended_stays_so",
    "a_run_is_created_with_an_input", "a_run_may_begin_with_a_journal", "a_run_may_begin_with_an_inbox",
    "a_run_that_exists_keeps_its_own_journal", "a_schedule_does_not_fire_without_an_input", "a_signal_after_the_end_is_refused",
    "a_store_without_transactions_refuses_them", "a_wait_closes_and_its_signal_is_consumed_together",
    "acquire_keeps_to_the_limits", "acquire_refuses_a_leased_run", "an_ended_run_cannot_be_cancelled",
    "an_ended_run_takes_its_input_and_stays_ended", "an_item_is_never_overwritten",
    "another_input_under_the_same_id_is_a_conflict", "create_compares_with_the_first_input", "ids_that_are_no_text_are_refused",
    "lists_refuse_a_limit_that_is_no_positive_number", "only_a_known_run_can_be_held",
    "only_an_unsuccessful_end_can_be_reopened", "only_what_is_in_the_inbox_can_be_consumed",
    "operators_ids_that_are_no_text_are_refused", "purge_takes_these_statuses_and_this_workflow",
    "save_is_refused_while_the_run_is_driven", "save_replaces_the_whole_run", "schedules_ids_that_are_no_text_are_refused",
    "streams_names_that_are_no_text_are_refused", "text_that_is_no_id_is_refused", "the_first_input_stays_the_first",
    "what_is_recorded_is_never_overwritten",
)  # fmt: skip
VERBS: Final = frozenset([*CORE_VERBS, *(verb for verbs in PART_VERBS.values() for verb in verbs)])


class InOtherWords(MemoryStore):
    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name == "transaction":
            return partial(_transact, found)
        return partial(_call, found) if name in VERBS else found


for promise in PROMISES:
    breaks(promise)(InOtherWords)


async def _call(verb: Callable[..., Awaitable[Any]], *given: Any, **options: Any) -> Any:
    try:
        return await verb(*given, **options)
    except (PerdureError, TypeError, ValueError) as error:
        raise _reworded(error) from error


def _transact(transaction: Callable[[Any], Any], lease: Any) -> Any:
    try:
        return transaction(lease)
    except StoreCapabilityError as error:
        raise _reworded(error) from error


def _reworded(error: Exception) -> Exception:
    *values, last = error.args
    return type(error)(*values, last + 1 if isinstance(last, int) else f"{last} indeed")


@breaks("a_transaction_of_a_stale_lease_leaves_nothing", "transaction")
class TransactsInOtherWords(Transactional):
    def transaction(self, lease: Any) -> Any:
        return _Reworded(super().transaction(lease))


class _Reworded:
    def __init__(self, context: Any) -> None:
        self.context = context

    async def __aenter__(self) -> Any:
        return await _call(self.context.__aenter__)

    async def __aexit__(self, *given: object) -> Any:
        return await _call(self.context.__aexit__, *given)


@breaks("an_outbox_refuses_what_its_store_refuses", "transaction", "outbox")
class OutboxInOtherWords(Transactional):
    async def outbox(self, connection: Any) -> Any:
        outbox = await super().outbox(connection)
        for verb in ("create", "signal"):
            setattr(outbox, verb, partial(_call, getattr(outbox, verb)))
        return outbox


@breaks("a_store_without_operator_verbs_refuses_them", parts=frozenset())
@breaks("a_store_without_schedules_refuses_them", parts=frozenset())
@breaks("a_store_without_streams_refuses_them", parts=frozenset())
class LacksPartsInOtherWords(MemoryStore):
    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return partial(_refuse, found, name) if any(name in verbs for verbs in PART_VERBS.values()) else found


async def _refuse(verb: Callable[..., Awaitable[Any]], name: str, *given: Any, **options: Any) -> Any:
    if name == "record" and "items" not in options:
        return await verb(*given, **options)
    raise StoreCapabilityError("memory", "such verbs")


@breaks("a_store_without_an_outbox_refuses_it", "transaction")
class LacksAnOutboxInOtherWords(Transactional):
    async def outbox(self, _connection: Any) -> Any:
        raise StoreCapabilityError("memory", "outbox")
