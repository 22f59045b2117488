"""Commands for approvals: what runs ask, and a person's decision."""

from __future__ import annotations

from typing import Annotated, Final

from cyclopts import App, Parameter

from perdure.cli.options import FilterOptions, StoreOptions, UsageError, parse_json
from perdure.cli.output import counted, in_utc, preview, print_error, print_json_lines, print_table, print_text, report
from perdure.model.approvals import default_key
from perdure.operations.approvals import UNCHANGED

_DEFAULT: Final = StoreOptions()
_EVERY_RUN: Final = FilterOptions()
_COLUMNS: Final = ("run", "workflow", "name", "until (UTC)", "assignees", "payload")


def add_commands(app: App) -> None:
    """Add the commands of this module."""
    for command in (approvals, approve, reject):
        app.command(command)


def approvals(
    *,
    assignee: Annotated[str | None, Parameter(help="Only what this person may decide.")] = None,
    filters: FilterOptions = _EVERY_RUN,
    limit: Annotated[int, Parameter(help="At most so many.")] = 100,
    options: StoreOptions = _DEFAULT,
) -> None:
    """List what runs ask and nobody has decided."""
    if filters.status is not None:
        raise UsageError("only runs that have not ended ask for approvals, so --status makes no sense here")
    selection = filters.selection()
    found = options.call(lambda runtime: runtime.approvals(assignee=assignee, limit=limit, **selection))
    if options.json:
        print_json_lines(found)
        return
    if not found:
        print_text("no approvals")
        return
    rows = [
        [
            each.run_id,
            each.workflow,
            each.name if each.key == default_key(each.name) else f"{each.name} ({each.key})",
            in_utc(each.expires_at),
            ", ".join(each.assignees),
            preview(each.payload),
        ]
        for each in found
    ]
    print_table(_COLUMNS, rows)
    if len(found) == limit:
        print_error(f"{counted(limit, 'approval')} at most {'are' if limit > 1 else 'is'} shown; --limit shows more")


def approve(
    run_id: str,
    name: str,
    /,
    *,
    by: Annotated[str, Parameter(help="Who approves. It is recorded.")],
    payload: Annotated[str | None, Parameter(help="Another payload to approve instead, as JSON.")] = None,
    key: Annotated[str | None, Parameter(help="Which one, if the run asks under this name several times.")] = None,
    options: StoreOptions = _DEFAULT,
) -> None:
    """Approve what a run asks. It is decided only once."""
    edited = UNCHANGED if payload is None else parse_json(payload, "--payload")
    options.call(lambda runtime: runtime.approve(run_id, name, by=by, payload=edited, key=key))
    report(
        options.json, f"approved {name!r} of run {run_id!r}", {"id": run_id, "approval": name, "decision": "approved", "by": by}
    )


def reject(
    run_id: str,
    name: str,
    /,
    *,
    by: Annotated[str, Parameter(help="Who rejects. It is recorded.")],
    reason: Annotated[str | None, Parameter(help="Why. It is recorded.")] = None,
    key: Annotated[str | None, Parameter(help="Which one, if the run asks under this name several times.")] = None,
    options: StoreOptions = _DEFAULT,
) -> None:
    """Reject what a run asks. It is decided only once."""
    options.call(lambda runtime: runtime.reject(run_id, name, by=by, reason=reason, key=key))
    report(
        options.json, f"rejected {name!r} of run {run_id!r}", {"id": run_id, "approval": name, "decision": "rejected", "by": by}
    )
