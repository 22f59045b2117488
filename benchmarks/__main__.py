"""`make bench`: every workload in turn, several times over, as medians and as ratios to its floor."""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Awaitable, Callable

import msgspec

from benchmarks import workloads

Workload = Callable[[], Awaitable[float]]

# (what, perdure, its floor): ratios are perdure / floor.
PAIRS: list[tuple[str, Workload, Workload]] = [
    ("step in memory / bare await", workloads.steps_in_memory, workloads.bare_awaits),
    ("sqlite, 1 run x 100 steps", lambda: workloads.steps_on_sqlite(1, 100), lambda: workloads.floor(1, 100)),
    ("sqlite, 1 run x 1,000 steps", lambda: workloads.steps_on_sqlite(1, 1000), lambda: workloads.floor(1, 1000)),
    ("sqlite, 1 run x 10,000 steps", lambda: workloads.steps_on_sqlite(1, 10_000), lambda: workloads.floor(1, 10_000)),
    ("sqlite, 100 runs x 10 steps", lambda: workloads.steps_on_sqlite(100, 10), lambda: workloads.floor(100, 10)),
    ("replay of 10,000 steps / bare await", lambda: workloads.replays_on_sqlite(10_000), workloads.bare_awaits),
    (
        "import perdure / import asyncio, msgspec",
        lambda: workloads.imports("import perdure"),
        lambda: workloads.imports("import asyncio, msgspec"),
    ),
]


class Row(msgspec.Struct):
    """The medians of one workload. `ratios` are those of the single rounds, sorted."""

    workload: str
    perdure_per_second: float
    floor_per_second: float
    ratio: float
    ratios: list[float]

    @classmethod
    def of(cls, workload: str, ours: list[float], floors: list[float]) -> Row:
        """The row for these samples, taken in pairs."""
        ratios = sorted(our / floor for our, floor in zip(ours, floors, strict=True))
        return cls(workload, statistics.median(ours), statistics.median(floors), statistics.median(ratios), ratios)


async def measure(rounds: int) -> list[Row]:
    """All workloads, interleaved, so that a busy moment of the machine hits both sides."""
    samples: list[tuple[list[float], list[float]]] = [([], []) for _ in PAIRS]
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
        for (_, ours, floor), (our_samples, floor_samples) in zip(PAIRS, samples, strict=True):
            our_samples.append(await ours())
            floor_samples.append(await floor())
    return [Row.of(what, ours, floors) for (what, _, _), (ours, floors) in zip(PAIRS, samples, strict=True)]


def show(rows: list[Row]) -> None:
    """The table."""
    print(f"{'workload':<42}{'perdure/s':>12}{'floor/s':>12}{'ratio':>10}   spread of the ratio")
    for row in rows:
        print(
            f"{row.workload:<42}{row.perdure_per_second:>12,.0f}{row.floor_per_second:>12,.0f}{row.ratio:>10.3f}"
            f"   {row.ratios[0]:.3f} to {row.ratios[-1]:.3f}"
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    rows = asyncio.run(measure(arguments.rounds))
    print(msgspec.json.encode(rows).decode()) if arguments.json else show(rows)


if __name__ == "__main__":
    main()
