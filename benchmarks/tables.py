"""The figures for a reader, in Markdown that a terminal shows well too: a table of the bars, and one for each workload."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.bars import BARS
from benchmarks.results import Measured, Results, Spread, Taken, figures, ratios, reached
from benchmarks.work import Work


def tables(results: Results) -> str:
    """Everything."""
    parts = ["### The bars", _bars(results)]
    for measured in results.workloads.values():
        parts += [f"### {measured.name[0].upper()}{measured.name[1:]}", _workload(measured)]
    if results.failures:
        parts += [
            "### What failed",
            "\n".join(f"- {workload}, {label}: {reason}" for workload, label, reason in results.failures),
        ]
    return "\n\n".join(parts) + "\n"


def _bars(results: Results) -> str:
    rows = []
    for bar in BARS:
        spread = reached(results, bar)
        if spread is None:
            rows.append([bar.promise, bar.bound, "not measured", "", ""])
        else:
            rows.append([bar.promise, bar.bound, _ratio(spread.median), _range(spread), _met(bar.is_met_by(spread.median))])
    return _table(["promise", "bar", "median ratio", "least to most", ""], rows)


def _met(is_met: bool) -> str:  # noqa: FBT001 - the answer, as a word
    return "met" if is_met else "**not met**"


def _workload(measured: Measured) -> str:
    match measured.measured:
        case "counts":
            return _table(
                ["", "done", "commits per step", "bytes written per step", "bytes stored per step"], list(_counts(measured))
            )
        case "import":
            return _table(["", "milliseconds", "least to most", "first row ÷ this row", "resident MB"], list(_imports(measured)))
        case "latency":
            return _table(["", "runs", "milliseconds", "least to most", "first row ÷ this row"], list(_latencies(measured)))
        case _:
            header = ["", "done", "steps/s", "least to most", "CPU µs per step", "first row ÷ this row", "least to most"]
            return _table(header, list(_times(measured)))


def _times(measured: Measured) -> Iterator[list[str]]:
    first = next(iter(measured.sides.values()))
    for label, taken in measured.sides.items():
        rate, cpu = figures(taken, "rate"), figures(taken, "CPU")
        if rate is None or cpu is None:
            yield [label, _done(taken.work), "failed", "", "", "", ""]
            continue
        against = None if taken is first else ratios(first, taken, "rate")
        yield [
            label, _done(taken.work), f"{rate.median:,.0f}", f"{rate.least:,.0f} to {rate.most:,.0f}",
            f"{cpu.median * 1e6:,.1f}" if cpu.median else "", *_against(against),
        ]  # fmt: skip


def _counts(measured: Measured) -> Iterator[list[str]]:
    for label, taken in measured.sides.items():
        spreads = [figures(taken, measure) for measure in ("commits", "bytes written", "bytes stored")]
        commits, written, stored = (None if spread is None else spread.median for spread in spreads)
        if commits is None:
            yield [label, _done(taken.work), "failed", "", ""]
        else:
            yield [label, _done(taken.work), f"{commits:.3f}", f"{written:,.0f}", f"{stored:,.0f}"]


def _latencies(measured: Measured) -> Iterator[list[str]]:
    first = next(iter(measured.sides.values()))
    for label, taken in measured.sides.items():
        time = figures(taken, "time")
        if time is None:
            yield [label, f"{taken.work.runs}", "failed", "", ""]
            continue
        against = "" if taken is first else _against(ratios(first, taken, "time"))[0]
        yield [
            label,
            f"{taken.work.runs}",
            f"{time.median * 1000:.1f}",
            f"{time.least * 1000:.1f} to {time.most * 1000:.1f}",
            against,
        ]


def _imports(measured: Measured) -> Iterator[list[str]]:
    first = next(iter(measured.sides.values()))
    for label, taken in measured.sides.items():
        time = figures(taken, "time")
        if time is None:
            yield [f"`{label}`", "failed", "", "", ""]
            continue
        against = "" if taken is first else _against(ratios(first, taken, "time"))[0]
        shown = f"{time.least * 1000:.1f} to {time.most * 1000:.1f}"
        yield [f"`{label}`", f"{time.median * 1000:.1f}", shown, against, f"{_resident(taken) / 1e6:.1f}"]


def _resident(taken: Taken) -> int:
    return min(sample.resident_bytes for sample in taken.samples if sample is not None)


def _done(work: Work) -> str:
    """How much of the work a side did, since slow ones do less."""
    runs = f"{work.runs:,} × {work.steps:,}"  # noqa: RUF001 - it means times
    return f"{runs}, {work.at_once:,} at once" if work.at_once > 1 else runs


def _against(spread: Spread | None) -> list[str]:
    return ["", ""] if spread is None else [_ratio(spread.median), _range(spread)]


def _ratio(value: float) -> str:
    """Three digits that matter."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _range(spread: Spread) -> str:
    return f"{_ratio(spread.least)} to {_ratio(spread.most)}"


def _table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table whose columns are aligned in plain text too. The first column is words, the others figures."""
    widths = [max(len(row[n]) for row in [header, *rows]) for n in range(len(header))]

    def line(cells: list[str]) -> str:
        padded = [
            cell.rjust(width) if n else cell.ljust(width) for n, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = "|".join("-" * (width + 2) if not n else "-" * (width + 1) + ":" for n, width in enumerate(widths))
    return "\n".join([line(header), f"|{rule}|", *(line(row) for row in rows)])
