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
# A column of this width is no reason to move a cell to a line of its own.
_ENOUGH: Final = 60


def print_json(document: Any) -> None:
    """One line of JSON on stdout."""
    sys.stdout.write(safe_json(msgspec.json.encode(document)) + "\n")


def safe_json(encoded: bytes) -> str:
    """Return JSON of the same meaning, in which no character acts upon a terminal or is invisible: they are escaped."""
    text = encoded.decode()
    if text.isascii():  # JSON has its own escapes for the characters below the space, and only DEL is left
        return text.replace("\x7f", "\\u007f")
    return "".join(char if char.isprintable() or char == "\n" else _json_escape(char) for char in text)


def _json_escape(char: str) -> str:
    units = char.encode("utf-16-be")
    return "".join(f"\\u{units[n] << 8 | units[n + 1]:04x}" for n in range(0, len(units), 2))


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


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, moves_last: bool = False) -> None:
    """Print a table on stdout, of which no cell but the last is cut.

    On a terminal the last cell is cut to what is left of the line; with `moves_last` it moves to a line of its own where little
    is left. Elsewhere each row is one line, for programs such as cut and awk: nothing is cut, and an empty cell is `-`, unless it
    is the last.
    """
    screen = console()
    if screen.is_terminal:
        for line in table_lines(columns, rows, screen.width, moves_last=moves_last):
            screen.print(line, soft_wrap=True)
        return
    filled = [[*(cell or "-" for cell in row[:-1]), row[-1]] for row in rows]
    sys.stdout.write("".join(f"{line.plain}\n" for line in table_lines(columns, filled)))


def table_lines(
    columns: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None, *, moves_last: bool = False
) -> list[Text]:
    """Return the lines of a table; with a width, the last cell of each is cut so that the line keeps to it, if it can."""
    cells = [[Text(name, style="bold") for name in columns], *([_cell(text) for text in row] for row in rows)]
    widths = [max(row[n].cell_len for row in cells) for n in range(len(columns) - 1)]
    if width is None:
        return [_joined(row, widths) for row in cells]
    left, lines = max(width - sum(widths) - 2 * len(widths), _LEAST_CUT), list[Text]()
    for row in cells:
        if moves_last and left < min(row[-1].cell_len, _ENOUGH):
            row[-1].truncate(width - 2, overflow="ellipsis")
            lines += [_joined([*row[:-1], Text()], widths), Text("  ").append_text(row[-1])]
        else:
            row[-1].truncate(left, overflow="ellipsis")
            lines.append(_joined(row, widths))
    return lines


def _joined(cells: Sequence[Text], widths: Sequence[int]) -> Text:
    """Return the cells as one line, without spaces at its end."""
    line = Text()
    for cell, width in zip(cells, [*widths, 0], strict=True):
        line.append_text(cell).append(" " * (max(width - cell.cell_len, 0) + 2))
    line.rstrip()
    return line


def _cell(text: str) -> Text:
    return Text(printable(text.replace("\n", " ").replace("\t", " ")), style=_STYLES.get(text, ""))


def in_utc(at: datetime | None) -> str:
    """An instant in UTC, to the second."""
    return "" if at is None else f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S}"


def counted(number: int, noun: str) -> str:
    """Return the number with the noun, in the plural unless it is one: `1 run`, `2 runs`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


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
