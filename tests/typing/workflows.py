"""What `@workflow` makes of a function, and what calling, running and starting it infers."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, assert_type

from perdure import Context, Err, Ok, Outcome, Run, Suspended, Workflow, stores, workflow


@dataclass
class Order:
    user_id: int
    cents: int


@dataclass
class Receipt:
    payment_id: str


@workflow
async def checkout(ctx: Context, order: Order) -> Receipt:
    return Receipt(f"{ctx.run_id}:{order.cents}")


@workflow(name="refund", version=2, strict=True, on_changed_arguments="error")
async def refund(ctx: Context, order: Order, reason: str = "", *, is_partial: bool = False) -> str:
    return f"{ctx.run_id}:{order.cents}:{reason}:{is_partial}"


@workflow
async def review(ctx: Context, order: Order) -> Ok[Receipt] | Err[str]:
    return Ok(Receipt(ctx.run_id)) if order.cents else Err("empty")


@workflow
async def appeal(ctx: Context, order: Order, note: str = "") -> Ok[Receipt] | Err[str]:
    return Err(ctx.run_id + note) if order.cents else Ok(Receipt("none"))


@workflow()
async def clean_up(ctx: Context) -> None:
    assert ctx.run_id


@workflow
async def anything(ctx: Context, value: Any) -> Any:
    return [ctx.run_id, value]


async def plain(ctx: Context[Any], number: int) -> int:
    return number + len(ctx.run_id)


@workflow(resume_state=lambda: None)
async def resumed(ctx: Context, number: int) -> int:
    return number + len(ctx.run_id)


by_hand = Workflow("by-hand", plain, deps={"url": "https://example.org"}, strict=False)


async def called_like_a_function(order: Order) -> None:
    assert_type(await checkout(order), Receipt)
    assert_type(await checkout(order=order), Receipt)
    assert_type(await refund(order), str)
    assert_type(await refund(order, "late", is_partial=True), str)
    assert_type(await clean_up(), None)
    assert_type(await by_hand(1), int)
    assert_type(await review(order), Ok[Receipt] | Err[str])


async def run_with_options(order: Order) -> None:
    assert_type(await checkout.run(order, id="o1", store="sqlite:///app.db"), Outcome[Receipt])
    assert_type(await checkout.run(order, id="o1", store=stores.memory()), Outcome[Receipt])
    assert_type(await checkout.run(order, id="o1", retry_failed=True, wait=False), Outcome[Receipt])
    assert_type(await checkout.run(order, deps={"url": ""}, strict=True, on_changed_arguments="ignore"), Outcome[Receipt])
    assert_type(await clean_up.run(id="c1"), Outcome[None])
    assert_type(await by_hand.run(1, id="b1"), Outcome[int])


async def run_without_options(order: Order) -> None:
    assert_type(await checkout.run(order), Outcome[Receipt])
    assert_type(await refund.run(order), Outcome[str])
    assert_type(await refund.run(order, "late"), Outcome[str])
    assert_type(await clean_up.run(), Outcome[None])


async def a_result_that_is_returned_is_the_outcome(order: Order) -> None:
    assert_type(await review.run(order), Outcome[Receipt])
    assert_type(await review.run(order, id="r1"), Outcome[Receipt])
    assert_type(await review.start(order, id="r1"), Run[Receipt])
    assert_type(await appeal.run(order), Outcome[Receipt])
    assert_type(await appeal.start(order), Run[Receipt])
    assert_type(await review.options(id="r1").run(order=order), Outcome[Receipt])
    assert_type(await (await review.options(id="r1").start(order)), Receipt)


async def keywords_go_through_options(order: Order) -> None:
    configured = refund.options(id="r1", store="sqlite:///app.db", start_at=datetime(2026, 1, 1, tzinfo=UTC))
    assert_type(await configured.run(order, reason="late", is_partial=True), Outcome[str])
    assert_type(await configured.run(order=order), Outcome[str])
    assert_type(await configured.start(order, is_partial=True), Run[str])
    assert_type(await refund.options(id="r1").run(order), Outcome[str])  # a default left out beside an option
    assert_type(await review.options(id="r1").start(order), Run[Receipt])
    assert_type(await checkout.options().run(order), Outcome[Receipt])


async def started(order: Order) -> None:
    run = await checkout.start(order, id="o1", store="sqlite:///app.db")
    assert_type(run, Run[Receipt])
    assert_type(run.id, str)
    assert_type(await run, Receipt)
    assert_type(await run.outcome(), Outcome[Receipt])
    assert_type(await run.signal("approved", {"by": "ada"}, dedupe="1"), None)
    assert_type(await run.cancel(), None)
    assert_type(await checkout.start(order), Run[Receipt])
    assert_type(await clean_up.start(), Run[None])


async def what_is_not_annotated_is_any() -> None:
    run = await anything.start(1, id="a1")
    value = await run
    assert_type(value, Any)
    outcome = await anything.run(1)
    assert_type(outcome, Outcome[Any])
    configured = await anything.options(id="a1").run(1)
    assert_type(configured, Outcome[Any])


def without_an_event_loop(order: Order) -> None:
    assert_type(checkout.run_sync(order), Outcome[Receipt])
    assert_type(checkout.run_sync(order, id="o1", store="sqlite:///app.db"), Outcome[Receipt])
    assert_type(refund.options(id="r1").run_sync(order, is_partial=True), Outcome[str])
    assert_type(review.run_sync(order, id="r1"), Outcome[Receipt])
    assert_type(review.options(id="r1").run_sync(order), Outcome[Receipt])
    assert_type(clean_up.run_sync(), Outcome[None])


def an_outcome_is_one_of_three(outcome: Outcome[int]) -> None:
    assert_type(outcome, Ok[int] | Err[Any] | Suspended)
