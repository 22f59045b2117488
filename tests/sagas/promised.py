"""What is promised and may not be there yet, in one place: each is used as soon as it exists."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, Final

from perdure import Runtime, StepInfo, definition
from perdure.context import ChildOptions
from perdure.errors import COMPENSATION_PREFIX
from perdure.operations.describe_run import RunDescription
from perdure.options import StoredOptions

HAS_NOT_UNDONE: Final = "not_undone" in RunDescription.__struct_fields__
HAS_TAKE_OVER: Final = "take_over" in inspect.signature(Runtime.fork).parameters
HAS_UNDO: Final = "undo" in inspect.signature(Runtime.cancel).parameters
HAS_CHILD_COMPENSATE: Final = "compensate" in {*ChildOptions.__annotations__, *StoredOptions.__annotations__}
HAS_RETIRED_MAPPING: Final = hasattr(definition, "Retired")


async def not_undone(runtime: Runtime, run_id: str) -> set[str] | None:
    """The keys of the steps that the run says were not undone; None while nothing says so."""
    if not HAS_NOT_UNDONE:
        return None
    description: Any = await runtime.describe(run_id)
    return {getattr(each, "key", each) for each in description.not_undone}


async def fork(runtime: Runtime, run_id: str, from_step: str, new_id: str, *, take_over: bool) -> bool:
    """Fork; whether the fork takes over what it copies."""
    options: dict[str, Any] = {"take_over": True} if take_over and HAS_TAKE_OVER else {}
    await runtime.fork(run_id, from_step=from_step, id=new_id, **options)
    return bool(options)


async def abandon(runtime: Runtime, run_id: str) -> bool:
    """Cancel without undoing. Whether that can be done."""
    if HAS_UNDO:
        options: dict[str, Any] = {"undo": False}
        await runtime.cancel(run_id, **options)
    return HAS_UNDO


def undoes(info: StepInfo) -> str:
    """The idempotency key of what a compensation undoes."""
    told: str | None = getattr(info, "undoes", None)
    return info.idempotency_key.replace(COMPENSATION_PREFIX, "", 1) if told is None else told


def retired(keys: Iterable[str], undo: Callable[..., Any] | None) -> Any:
    """The steps that the code has no more, with what undoes them."""
    return list(keys) if undo is None or not HAS_RETIRED_MAPPING else dict.fromkeys(keys, undo)


def child_options(undo: Callable[[Any], Any] | None) -> dict[str, Any]:
    """The options of a child that is to be undone."""
    return {} if undo is None or not HAS_CHILD_COMPENSATE else {"compensate": undo}
