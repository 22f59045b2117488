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


def _renames(program: Program, *kinds: str) -> bool:
    """Whether a deploy renames a node of these kinds."""
    renamed = {op.what.rpartition(" ")[2] for op in program.ops if op.kind == "deploy" and op.what.startswith("rename ")}
    return any(node.kind in kinds and node.at in renamed for node in all_nodes(program.version.nodes))


KNOWN: Final[tuple[Known, ...]] = (
    Known(
        "what is under way, and is renamed without alias, is begun a second time: only results are owed",
        "charged again",
        lambda program, _: _renames(program, "pay", "map", "child", "each"),
    ),
    Known(
        "the same: a run that has begun children, or reached time limits, under both names fits no code",
        "hang",
        lambda program, text: "does not ask for it" in text and _renames(program, "child", "each", "limit"),
    ),
    Known(
        "after a retry nothing is owed that came after an undone step which now returns something else: a rename goes unnoticed",
        "charged again",
        lambda program, _: _does(program, "retry") and _renames(program, "pay", "map"),
    ),
)


def unknown(program: Program, found: list[Violation]) -> list[Violation]:
    """Those among the violations that are not known."""
    return [each for each in found if not any(known.kind == each.kind and known.matches(program, each.text) for known in KNOWN)]
