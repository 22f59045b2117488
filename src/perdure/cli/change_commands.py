"""Commands that change runs: one by its id, or those that filters select."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final

import msgspec
from cyclopts import App, Parameter

from perdure.cli.options import CommandFailed, FilterOptions, StoreOptions, UsageError
from perdure.cli.output import counted, print_json, print_text, progress_bar, report, shown_in
from perdure.errors import RunNotFound
from perdure.model.logs import printable
from perdure.model.records import EndStatus, Status
from perdure.operations.many_runs import BulkReport
from perdure.runtime import Runtime

_SHOWN_REFUSALS: Final = 10


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ManyRunsOptions(FilterOptions):
    """The options of a command that changes one run, or those that have all that is given."""

    all: Annotated[bool, Parameter(negative=(), show_default=False, help="Every run of the store.")] = False
    yes: Annotated[bool, Parameter(negative=(), show_default=False, help="Do not ask.")] = False

    @property
    def is_filter(self) -> bool:
        """Whether runs are selected, rather than named by an id."""
        return self.all or any(value not in (None, "") for value in self.selection().values())


_DEFAULT: Final = StoreOptions()
_NO_FILTER: Final = ManyRunsOptions()


def add_commands(app: App) -> None:
    """Add the commands of this module."""
    for command in (cancel, retry, fork, hold, unhold, delete, purge):
        app.command(command)


def cancel(
    run_id: str | None = None,
    /,
    *,
    undo: Annotated[
        bool, Parameter(name="--undo", negative="--no-undo", help="Whether its compensations run; not with --no-undo.")
    ] = True,
    many: ManyRunsOptions = _NO_FILTER,
    options: StoreOptions = _DEFAULT,
) -> int:
    """Ask a run to stop, or those that the filters select; without --status, those that have not ended."""
    _check_choice(run_id, many)
    if run_id is None:
        return _change_many(lambda runtime: partial(runtime.cancel_many, undo=undo), "Cancel", "asked to stop", many, options)
    options.call(lambda runtime: runtime.cancel(run_id, undo=undo))
    report(options.json, f"run {run_id!r} was asked to stop; a worker ends it", {"id": run_id, "cancel_requested": True})
    return 0


def retry(run_id: str | None = None, /, *, many: ManyRunsOptions = _NO_FILTER, options: StoreOptions = _DEFAULT) -> int:
    """Let a failed, cancelled or dead run go on, or those that the filters select; without --status, failed and dead ones."""
    _check_choice(run_id, many)
    if run_id is None:
        return _change_many(lambda runtime: runtime.retry_many, "Retry", "made pending again", many, options)
    options.call(lambda runtime: runtime.retry(run_id))
    report(options.json, f"run {run_id!r} is pending again; a worker goes on with it", {"id": run_id, "status": "pending"})
    return 0


def fork(
    run_id: str,
    /,
    *,
    from_step: Annotated[str, Parameter(name="--from", help="The key of the step that is called anew, as `show` has it.")],
    new_id: Annotated[str | None, Parameter(name="--id", help="The id of the new run. Default: one that is made up.")] = None,
    take_over: Annotated[
        bool, Parameter(negative=(), show_default=False, help="If it fails, undo what the old run has done, too.")
    ] = False,
    options: StoreOptions = _DEFAULT,
) -> None:
    """Start a new run that has what this one recorded before a step, and calls that step anew."""

    async def start(runtime: Runtime) -> str:
        return (await runtime.fork(run_id, from_step=from_step, id=new_id, take_over=take_over)).id

    forked = options.call(start)
    report(options.json, forked, {"id": forked, "forked_from": run_id})


def hold(run_id: str | None = None, /, *, many: ManyRunsOptions = _NO_FILTER, options: StoreOptions = _DEFAULT) -> int:
    """Keep a run from being driven, or those that the filters select; without --status, those that have not ended."""
    _check_choice(run_id, many)
    if run_id is None:
        return _change_many(lambda runtime: runtime.hold_many, "Hold", "put on hold", many, options)
    options.call(lambda runtime: runtime.hold(run_id))
    report(options.json, f"run {run_id!r} is on hold", {"id": run_id, "held": True})
    return 0


def unhold(run_id: str | None = None, /, *, many: ManyRunsOptions = _NO_FILTER, options: StoreOptions = _DEFAULT) -> int:
    """Undo `hold`, for a run or for those that the filters select."""
    _check_choice(run_id, many)
    if run_id is None:
        return _change_many(lambda runtime: runtime.unhold_many, "Unhold", "taken off hold", many, options)
    options.call(lambda runtime: runtime.unhold(run_id))
    report(options.json, f"run {run_id!r} is not on hold", {"id": run_id, "held": False})
    return 0


def delete(
    run_id: str | None = None,
    /,
    *,
    force: Annotated[
        bool, Parameter(negative=(), show_default=False, help="Also a run that cannot undo what it has done.")
    ] = False,
    many: ManyRunsOptions = _NO_FILTER,
    options: StoreOptions = _DEFAULT,
) -> int:
    """Remove a run and everything recorded for it, or those that the filters select; without --status, those that have ended."""
    _check_choice(run_id, many)
    if run_id is None:
        return _change_many(lambda runtime: partial(runtime.delete_many, force=force), "Delete", "deleted", many, options)

    async def find(runtime: Runtime) -> Status:
        run = await runtime.get(run_id)
        if run is None:
            raise RunNotFound(run_id)
        return await run.status()

    status = options.call(find)
    if not many.yes:
        _confirm(f"Delete run {run_id!r} ({status}) and everything recorded for it?")
    options.call(lambda runtime: runtime.delete(run_id, force=force))
    report(options.json, f"run {run_id!r} is deleted", {"id": run_id, "deleted": True})
    return 0


def purge(
    *,
    older_than: Annotated[str, Parameter(help="How long ago they ended at least, such as 30d or 12h.")],
    status: Annotated[list[EndStatus] | None, Parameter(negative=(), help="Only runs that ended so; may be repeated.")] = None,
    workflow: Annotated[str | None, Parameter(help="Only runs of this workflow.")] = None,
    options: StoreOptions = _DEFAULT,
) -> None:
    """Delete runs that ended long ago."""
    deleted = options.call(lambda runtime: runtime.purge(older_than, status=status, workflow=workflow))
    report(options.json, f"deleted {counted(deleted, 'run')}", {"deleted": deleted})


def _check_choice(run_id: str | None, many: ManyRunsOptions) -> None:
    """Raise `UsageError` unless either one run is named or a filter is given."""
    if run_id is None and not many.is_filter:
        raise UsageError("which runs? Give an id, or filters such as --status failed --workflow checkout, or --all")
    if run_id is not None and many.is_filter:
        raise UsageError("an id and filters do not go together: give the id alone, or filters alone")


def _change_many(
    verb: Callable[[Runtime], Callable[..., Awaitable[BulkReport]]],
    name: str,
    done: str,
    many: ManyRunsOptions,
    options: StoreOptions,
) -> int:
    """Change the runs that are selected, once the number was confirmed. The exit code is 1 when some were refused."""
    selection: dict[str, Any] = {"all": many.all, **many.selection()}
    if not many.yes:
        number = options.call(lambda runtime: verb(runtime)(dry_run=True, **selection)).done
        _confirm(f"{name} {counted(number, 'run')}?")
    with progress_bar() as bar:
        result = options.call(lambda runtime: verb(runtime)(on_progress=shown_in(bar), **selection))
    if options.json:
        print_json(msgspec.to_builtins(result))
    else:
        print_text(f"{counted(result.done, 'run')} {done}, {result.refused} refused")
        for refusal in result.refusals[:_SHOWN_REFUSALS]:
            print_text(refusal.reason)
    return 0 if not result.refused else 1


def _confirm(question: str) -> None:
    """Ask on the terminal. Raises `CommandFailed` for any answer but yes, and `UsageError` where no one can answer."""
    if not sys.stdin.isatty():
        raise UsageError("this asks before it changes anything, and stdin is no terminal; pass --yes")
    sys.stderr.write(f"{printable(question)} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CommandFailed("nothing was changed")
