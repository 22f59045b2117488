"""What commands print: JSON for programs; tables and short sentences for people.

Text from a store may hold anything, also escape sequences for the terminal: it is shown through `printable`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Final, Literal

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from perdure.model.logs import printable

_STYLES: Final = {
    "completed": "green",
    "failed": "red",
    "dead": "red",
    "stops": "red",
    "cancelled": "yellow",
    "retrying": "yellow",
    "warns": "yellow",
    "running": "cyan",
    "waiting": "cyan",
    "suspended": "cyan",
}
# An argument in the wrong place is repeated in the message, and may be a DSN.
_PASSWORD: Final = re.compile(r"(://[^/@\s:]*:)[^\s]*@")
# A column is not cut to less than this.
_LEAST_CUT: Final = 20


def print_json(document: Any) -> None:
    """One line of JSON on stdout."""
    sys.stdout.write(msgspec.json.encode(document).decode() + "\n")


def print_json_lines(documents: Iterable[Any]) -> None:
    """One line of JSON on stdout for each of these."""
    for document in documents:
        print_json(document)


def console() -> Console:
    """The console for people on stdout, as wide as the terminal. With NO_COLOR it writes no escape sequence at all."""
    color_system: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"
    return Console(markup=False, highlight=False, emoji=False, soft_wrap=False, color_system=color_system)


def print_text(text: str) -> None:
    """A sentence on stdout, not wrapped."""
    sys.stdout.write(printable(text) + "\n")


def report(is_json: bool, sentence: str, document: dict[str, Any]) -> None:  # noqa: FBT001 - the value of --json
    """What a command has done, as a sentence or as JSON."""
    if is_json:
        print_json(document)
    else:
        print_text(sentence)


def print_error(message: str) -> None:
    """A message on stderr. What looks like the password of a DSN is not shown."""
    shown = printable(_PASSWORD.sub(r"\1***@", message))
    sys.stderr.write(f"perdure: {shown}\n")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, cut: bool = False) -> None:
    """A table on stdout, without spaces at the ends of lines."""
    screen = console()
    with screen.capture() as captured:
        screen.print(make_table(columns, rows, screen.width if cut else None))
    sys.stdout.write("\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n")


def make_table(columns: Sequence[str], rows: Sequence[Sequence[str]], cut_at: int | None = None) -> Table:
    """A table whose first and last columns are folded where they are too long for the terminal.

    With `cut_at` the cells of the last column are cut instead, so that a line has at most so many characters.
    """
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, no_wrap=column not in (columns[0], columns[-1]), overflow="fold")
    cells = [[_cell(text) for text in row] for row in rows]
    if cut_at is not None:
        taken = sum(max([len(name), *(row[n].cell_len for row in cells)]) + 2 for n, name in enumerate(columns[:-1]))
        for row in cells:
            row[-1].truncate(max(cut_at - taken, _LEAST_CUT), overflow="ellipsis")
    for row in cells:
        table.add_row(*row)
    return table


def _cell(text: str) -> Text:
    return Text(printable(text.replace("\n", " ")), style=_STYLES.get(text, ""))


def in_utc(at: datetime | None) -> str:
    """An instant in UTC, to the second."""
    return "" if at is None else f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S}"


def length(seconds: float | None) -> str:
    """A length of time, short."""
    if seconds is None:
        return ""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")]
    first = next(index for index, (number, _) in enumerate(parts) if number)
    return " ".join(f"{number} {unit}" for number, unit in parts[first : first + 2] if number)


def preview(value: Any, width: int = 200) -> str:
    """A value as JSON, cut to `width` characters."""
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= width else text[: width - 1] + "…"


def progress_bar() -> Progress:
    """A bar on stderr, drawn only on a terminal."""
    screen = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    return Progress(*columns, console=screen, disable=not screen.is_terminal, transient=True)


def shown_in(bar: Progress) -> Callable[[int, int | None], None]:
    """What shows in the bar how many of how many runs are done."""
    task = bar.add_task("runs", total=None)
    return lambda done, total: bar.update(task, completed=done, total=total)
