"""The promises of the suite as a page of the docs: `python -m perdure.testing.contract PAGE` writes them there.

Between the two marks in the page stands what the docstrings say, and nothing else; without a page it is printed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from perdure.testing.contract import PARTS, all_cases
from perdure.testing.contract.cases import Case

BEGIN: Final = "<!-- promises: written by python -m perdure.testing.contract docs/writing-a-store.md -->"
END: Final = "<!-- end of the promises -->"


def promises() -> str:
    """Every part of the suite with its promises, in Markdown."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    cases = all_cases()
    yield f"{len(cases)} promises in {len(PARTS)} parts."
    for part in PARTS:
        title, _, rest = _first_line(part.__doc__).partition(": ")
        yield f"\n### {title}\n\n{rest[:1].upper()}{rest[1:]}\n"
        yield from (_line(case) for case in cases if case.part == part.__name__)


def _first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0]


def _line(case: Case) -> str:
    sentence = " ".join(case.sentence.split())
    return f"- {sentence}{_concern(case)} (`{case.name}`)"


def _concern(case: Case) -> str:
    if case.needs is not None:
        return f" Asked of stores that declare `{case.needs}`."
    return "" if case.lacks is None else f" Asked of stores that do not declare `{case.lacks}`."


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
