"""Puts figures into docs/benchmarks.md: `python -m benchmarks.page build/benchmarks.json`. None is typed in by hand.

The samples are kept beside the page, and a test compares the two.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.results import Results
from benchmarks.tables import tables

PAGE: Final = Path(__file__).parent.parent / "docs" / "benchmarks.md"
SAMPLES: Final = PAGE.with_suffix(".json")
BEGIN: Final = "<!-- figures begin: written by benchmarks/page.py -->"
END: Final = "<!-- figures end -->"


def with_figures(page: str, results: Results) -> str:
    """The page with these figures between its marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page needs the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{_made_on(results)}\n\n{tables(results)}\n{END}{after}"


def _made_on(results: Results) -> str:
    facts = {
        "date": results.date,
        "commit": results.commit,
        "rounds": str(results.rounds),
        **results.machine,
        "versions": ", ".join(f"{name} {version}" for name, version in results.versions.items()),
        **{f"settings of {name}": setting for name, setting in results.settings.items()},
    }
    return "\n".join(f"- {name}: {fact}" for name, fact in facts.items())


def main(source: str) -> None:
    """Keep the samples, and write the page."""
    results = msgspec.json.decode(Path(source).read_bytes(), type=Results)
    if results.quick:
        sys.exit(f"{source} was made with --quick, whose figures mean nothing")
    SAMPLES.write_bytes(msgspec.json.encode(results) + b"\n")
    PAGE.write_text(with_figures(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
