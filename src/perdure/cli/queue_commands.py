"""Commands on queues: list those that have limits, and set the limits of one."""

from __future__ import annotations

from typing import Annotated, Any, Final

from cyclopts import App, Parameter

from perdure.cli.options import StoreOptions
from perdure.cli.output import print_json_lines, print_table, print_text, report
from perdure.worker.queues import Queue

_DEFAULT: Final = StoreOptions()


def add_commands(app: App) -> None:
    """Add `queues` and the command under it."""
    queues = App("queues", help="List queues that have limits, or set the limits of one.")
    queues.default(list_queues)
    queues.command(set_limits, name="set")
    app.command(queues)


def list_queues(*, options: StoreOptions = _DEFAULT) -> None:
    """List queues that have limits, or set the limits of one."""
    found = options.call(lambda runtime: runtime.queues())
    if options.json:
        print_json_lines(_document(queue) for queue in found)
    elif not found:
        print_text("no queue has limits")
    else:
        rows = [[queue.name, _limit(queue.concurrency), _limit(queue.per_key), _limit(queue.rate)] for queue in found]
        print_table(("queue", "at once", "per key", "rate"), rows)


def set_limits(
    name: str,
    /,
    *,
    concurrency: Annotated[int | None, Parameter(help="How many runs are driven at once, by all workers.")] = None,
    per_key: Annotated[int | None, Parameter(help="How many of them may have the same limit key.")] = None,
    rate: Annotated[str | None, Parameter(help="How fast runs start: 10/s, 30/m, 600/h or 5/d.")] = None,
    options: StoreOptions = _DEFAULT,
) -> None:
    """Replace the limits of a queue, also while workers run. A limit that is not given is removed."""
    queue = Queue(name, concurrency=concurrency, per_key=per_key, rate=rate)
    options.call(lambda runtime: runtime.set_queue(queue))
    report(options.json, _sentence(queue), _document(queue))


def _limit(limit: int | str | None) -> str:
    return "" if limit is None else str(limit)


def _document(queue: Queue) -> dict[str, Any]:
    return {"name": queue.name, "concurrency": queue.concurrency, "per_key": queue.per_key, "rate": queue.rate}


def _sentence(queue: Queue) -> str:
    limits = [
        f"{queue.concurrency} at once" if queue.concurrency is not None else "",
        f"{queue.per_key} per key" if queue.per_key is not None else "",
        queue.rate or "",
    ]
    return f"queue {queue.name!r}: {', '.join(filter(None, limits)) or 'no limits'}"
