"""`sys.exit` and KeyboardInterrupt in a run's own code.

asyncio passes both on to whatever runs the event loop, which ends the process or its worker, and every other run with it. A run
that exits at each attempt would end every worker that takes it up. So, where the run is in a store, an exit of its code ends
only the attempt: nothing is recorded for it, and the attempt counts as failed. Ctrl-C is for the process: Python raises it in the
main thread, between two instructions of whatever runs there, and it says nothing about the run.
"""

from __future__ import annotations

import threading

from perdure.errors import RunInterrupted


class InterruptInThread(KeyboardInterrupt):
    """A plain step raised KeyboardInterrupt in its thread, where Ctrl-C never arrives: it is the step's own doing."""


def is_for_process(interrupt: BaseException) -> bool:
    """Whether it may be Ctrl-C, so that the process has to end."""
    return (
        isinstance(interrupt, KeyboardInterrupt)
        and not isinstance(interrupt, InterruptInThread)
        and threading.current_thread() is threading.main_thread()
    )


def describe_interrupt(run_id: str, where: str, interrupt: BaseException) -> RunInterrupted:
    """The error of the attempt whose code exited at `where`: a step, or the body."""
    error = RunInterrupted(run_id, where, _what(interrupt))
    error.__cause__ = interrupt
    return error


def _what(interrupt: BaseException) -> str:
    if not isinstance(interrupt, SystemExit):
        return "raised KeyboardInterrupt"
    code = interrupt.code
    return f"called sys.exit({'' if code is None else repr(code)})"
