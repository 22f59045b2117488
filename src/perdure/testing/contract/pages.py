"""The promises of the suite as a page of the docs: `python -m perdure.testing.contract PAGE` writes them there.

Between the two marks in the page stands what the docstrings say, and nothing else; without a page it is printed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from perdure.store import Capability
from perdure.testing.contract import CORE, OPTIONAL, PARTS, all_cases
from perdure.testing.contract.cases import Case

BEGIN: Final = "<!-- promises: written by python -m perdure.testing.contract docs/writing-a-store.md -->"
END: Final = "<!-- end of the promises -->"


def promises() -> str:
    """Every part of the suite with its promises, in Markdown."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield f"{len(all_cases())} promises in {len(PARTS)} parts: {len(CORE)} of the core, then {len(OPTIONAL)} that are optional."
    for part in PARTS:
        cases = [case for case in all_cases() if case.part == part.__name__]
        title, _, rest = _first_line(part.__doc__).partition(": ")
        # Said once for the part, if all of its cases need it.
        needs = frozenset.intersection(*(case.needs for case in cases))
        yield f"\n### {title}\n\n{rest[:1].upper()}{rest[1:]}{_asked(needs)}\n"
        yield from (_line(case, needs) for case in cases)


def _first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0]


def _line(case: Case, said: frozenset[Capability]) -> str:
    sentence = " ".join(case.sentence.split())
    without = "" if case.lacks is None else f" Asked of stores that do not declare `{case.lacks}`."
    return f"- {sentence}{_asked(case.needs - said)}{without} (`{case.name}`)"


def _asked(needs: frozenset[Capability]) -> str:
    return f" Asked of stores that declare {' and '.join(f'`{name}`' for name in sorted(needs))}." if needs else ""


def with_promises(page: str) -> str:
    """The page with the promises between its marks. Raises `ValueError` when it has none."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no place for the promises; it needs the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{promises()}\n{END}{after}"


def write_promises(path: Path) -> None:
    """Bring the page up to date."""
    path.write_text(with_promises(path.read_text(encoding="utf-8")), encoding="utf-8")
