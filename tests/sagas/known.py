"""Violations that are known and not repaired yet: any other one fails the test. In the end this table is empty."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, NamedTuple

from tests.sagas.judge import Violation
from tests.sagas.programs import Program


class Known(NamedTuple):
    """A defect, and how its violations are told from others."""

    what: str
    kinds: tuple[str, ...]
    matches: Callable[[Program, str], bool]


def _has(kind: str) -> Callable[[Program, str], bool]:
    return lambda program, _: any(op.kind == kind for op in program.ops)


KNOWN: Final[tuple[Known, ...]] = (
    Known("a fork refunds its original", ("another's refund", "refunded twice", "refunded in force"), _has("fork")),
    Known("keys of steps without an undoing change", ("charged again",), lambda _, text: ";generation=" in text),
    Known("keys are not escaped", ("key used twice",), lambda _, text: re.search(r"[~;/%]", text) is not None),
    Known("what changed code does not reach is not undone", ("not undone",), _has("deploy")),
    Known("the wrong key is refunded after a retry", ("not undone",), _has("retry")),
    Known("a leftover that waits for a child ends too late", ("hang",), lambda _, text: "waits for child" in text),
    Known("a retry keeps what the failure had cancelled", ("hang", "refunded key"), _has("retry")),
)


def unknown(program: Program, found: list[Violation]) -> list[Violation]:
    """Those among the violations that are not known."""
    return [each for each in found if not any(each.kind in known.kinds and known.matches(program, each.text) for known in KNOWN)]
