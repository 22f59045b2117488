"""Violations that are known and not repaired yet: any other one fails the test. In the end this table is empty."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from tests.sagas.judge import Violation
from tests.sagas.programs import Program, all_nodes


class Known(NamedTuple):
    """A defect, and how its violations are told from others."""

    what: str
    kind: str
    matches: Callable[[Program, str], bool]


def _does(program: Program, *kinds: str) -> bool:
    return {*kinds} <= {op.kind for op in program.ops}


def _has(program: Program, *kinds: str) -> bool:
    return any(node.kind in kinds for node in all_nodes(program.version.nodes))


KNOWN: Final[tuple[Known, ...]] = (
    Known(
        "a cancelled run that does not fit is due at once after its deadline",
        "spins",
        lambda program, _: _does(program, "cancel") and any(start.deadline for start in program.starts),
    ),
    Known(
        "the same, which does not end",
        "hang",
        lambda program, text: (
            _does(program, "cancel") and "does not reach" in text and any(start.deadline for start in program.starts)
        ),
    ),
    Known(
        "a fork calls steps again that were undone and done again",
        "charged again",
        lambda program, _: _does(program, "fork", "retry", "deploy"),
    ),
    Known(
        "a step that was refunded is called when the code changes in the middle of compensations",
        "refunded key",
        lambda program, _: _does(program, "deploy"),
    ),
    Known(
        "a child that is retried and cancelled forgets what was not undone",
        "not undone",
        lambda program, text: _does(program, "retry") and "ended as cancelled" in text and _has(program, "child", "each"),
    ),
    Known(
        "a retry keeps what was cancelled since another branch won",
        "hang",
        lambda program, text: _does(program, "retry") and "which is new" in text and _has(program, "race"),
    ),
    Known(
        "not_undone does not name a completed child that the parent has not heard of",
        "hang",
        lambda program, text: "does not reach" in text and _has(program, "child", "each"),
    ),
    Known(
        "a function may end while the journal has a failure that it has not asked for",
        "refunded in force",
        lambda program, _: _does(program, "deploy"),
    ),
)


def unknown(program: Program, found: list[Violation]) -> list[Violation]:
    """Those among the violations that are not known."""
    return [each for each in found if not any(known.kind == each.kind and known.matches(program, each.text) for known in KNOWN)]
