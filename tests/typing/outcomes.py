"""How outcomes are taken apart: every case, and nothing but the cases."""

from __future__ import annotations

from datetime import datetime
from typing import Any, assert_never, assert_type

from perdure import Context, Err, Ok, Outcome, Suspended, WaitingFor, workflow


@workflow
async def double(ctx: Context, number: int) -> int:
    await ctx.sleep("nap", "1h")
    return number * 2


async def matched_by_position() -> str:
    match await double.run(1, id="d1", store="sqlite:///app.db"):
        case Ok(value):
            assert_type(value, int)
            return "ok"
        case Err(error):
            assert_type(error, Any)
            return "err"
        case Suspended(run_id, wake_at, waiting_for):
            assert_type(run_id, str)
            assert_type(wake_at, datetime | None)
            assert_type(waiting_for, tuple[WaitingFor, ...])
            return "suspended"


def matched_by_keyword(outcome: Outcome[int]) -> str:
    match outcome:
        case Ok(value=value):
            assert_type(value, int)
        case Err(error=ValueError()):
            return "a ValueError"
        case Err(error=error, cause=cause):
            assert_type(error, Any)
            assert_type(cause, Any)
        case Suspended(wake_at=at, waiting_for=awaited):
            assert_type(at, datetime | None)
            assert_type(awaited, tuple[WaitingFor, ...])
        case _:
            assert_never(outcome)
    return "anything else"


def told_apart_by_class(outcome: Outcome[int]) -> int:
    if isinstance(outcome, Ok):
        return outcome.value
    if isinstance(outcome, Err):
        assert_type(outcome, Err[Any])
        return 0
    assert_type(outcome, Suspended)
    return len(outcome.run_id)


def unwrapped(outcome: Outcome[int]) -> None:
    assert_type(outcome.unwrap(), int)


def collected(results: list[Ok[int] | Err[Any]]) -> int:
    total = 0
    for result in results:
        match result:
            case Ok(value):
                total += value
            case Err():
                pass
            case _:
                assert_never(result)
    return total
