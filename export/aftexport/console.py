"""What people look at: stages as they run, tables at the end."""

import io
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich import box, markup
from rich.console import Console
from rich.table import Column, Table


def accept_any_terminal() -> None:
    """Lets a terminal that lacks a character show a question mark in its place."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


_CONTROLS = {code: repr(chr(code))[1:-1] for code in (*range(0x20), *range(0x7F, 0xA0))}
_BUT_LINES = {code: shown for code, shown in _CONTROLS.items() if chr(code) not in "\t\n"}


def one_line(text: str) -> str:
    """A text as one line of a log: each of its control characters as an escape."""
    return text.translate(_CONTROLS)


def escape(text: str) -> str:
    """A text as it stands, for a console: nothing in it marks up, or moves the cursor."""
    return markup.escape(text.translate(_BUT_LINES))


Progress = Callable[[int, int, str], None]
"""Takes how many are done, of how many, and what they are."""

_SILENT_SECONDS = 2.0
_SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def stage(console: Console, title: str) -> Iterator[Progress]:
    """Shows that ``title`` is under way, and how long it took once it is done.

    Yields:
        A function that shows how far it is, once it takes over two seconds: in a terminal on the
        line of the stage, elsewhere as a line every ten seconds.
    """
    start = time.perf_counter()
    next_line = start + _SILENT_SECONDS
    title = escape(title)
    with console.status(f"{title} ...") as status:

        def show(done: int, total: int, unit: str) -> None:
            nonlocal next_line
            now = time.perf_counter()
            if now < next_line:
                return
            text = f"{title} ... {done:,} of {total:,} {escape(unit)}"
            if console.is_terminal:
                status.update(text)
            else:
                console.print(text)
                next_line = now + _SECONDS_BETWEEN_LINES

        yield show
    console.print(f"[green]done[/] {title} [dim]{time.perf_counter() - start:.1f} s[/]")


def plain_table(*headers: str) -> Table:
    """An empty table in the one style; long cells wrap, so that nothing in them is lost."""
    columns = [Column(header, overflow="fold") for header in headers]
    return Table(*columns, box=box.SIMPLE_HEAD, show_header=any(headers))


def operator_table(operators: Mapping[str, int], paths: Mapping[str, str]) -> Table:
    """Which way each custom operator runs on this machine."""
    table = plain_table("operator", "nodes", "path on this machine")
    for op_type, count in operators.items():
        way = "fused kernel" if paths[op_type] == "fused" else "portable body"
        table.add_row(op_type, str(count), way)
    if not operators:
        table.add_row("none: standard operators only", "", "")
    return table


def size_table(files: Mapping[str, int]) -> Table:
    """The files of a bundle."""
    table = plain_table("file", "size")
    table.columns[1].justify = "right"
    for name, size in files.items():
        table.add_row(name, f"{size / 1024:,.0f} KiB" if size >= 1024 else f"{size} B")
    return table


def shape_text(shape: Sequence[int]) -> str:
    """``2 x 67`` for a shape."""
    return " x ".join(map(str, shape))
