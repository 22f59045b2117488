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


def _renames(program: Program, *kinds: str) -> bool:
    """Whether a deploy renames a node of these kinds."""
    renamed = {op.what.rpartition(" ")[2] for op in program.ops if op.kind == "deploy" and op.what.startswith("rename ")}
    return any(node.kind in kinds and node.at in renamed for node in all_nodes(program.version.nodes))


KNOWN: Final[tuple[Known, ...]] = (
    Known(
        "after a retry of a cancelled run nothing is owed that was recorded since the first wait that the cancel ended",
        "charged again",
        lambda program, _: _does(program, "cancel", "retry") and _renames(program, "pay", "map"),
    ),
    Known(
        "a child that is under way and was renamed is started a second time",
        "charged again",
        lambda program, _: _renames(program, "child", "each"),
    ),
    Known(
        "a cancelled parent is driven twice a second while its child cannot end",
        "spins",
        lambda program, _: _does(program, "cancel") and _has(program, "child", "each"),
    ),
    Known(
        "the same, which does not end",
        "hang",
        lambda program, _: _does(program, "cancel", "deploy") and _has(program, "child", "each"),
    ),
)


def unknown(program: Program, found: list[Violation]) -> list[Violation]:
    """Those among the violations that are not known."""
    return [each for each in found if not any(known.kind == each.kind and known.matches(program, each.text) for known in KNOWN)]
