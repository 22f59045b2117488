"""`make bench`: measures everything, prints the tables, and keeps all samples as JSON if asked."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

import msgspec

from benchmarks.measuring import Plan, measure
from benchmarks.results import Results
from benchmarks.tables import tables


def main() -> int:
    """Measure and print. The status says whether everybody could do everything; bars are for the reader."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="how often everything is measured (5)")
    parser.add_argument(
        "--only", action="append", metavar="PATTERN", help="workloads whose name matches, like '*SQLite'; repeatable"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples there, after each round")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it works, and nothing else")
    parser.add_argument("--without-peers", action="store_true", help="perdure and the floors only, without another environment")
    asked = parser.parse_args()
    plan = Plan(rounds=asked.rounds, only=tuple(asked.only or "*"), quick=asked.quick, peers=not asked.without_peers)
    if not plan.workloads():
        parser.error(f"no workload matches {asked.only!r}")

    def keep(results: Results) -> None:
        if asked.json is not None:
            asked.json.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")

    results = asyncio.run(measure(plan, keep))
    print(tables(results))
    return 1 if results.failures else 0


if __name__ == "__main__":
    sys.exit(main())
