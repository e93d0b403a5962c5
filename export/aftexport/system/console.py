"""Output for the terminal: stages during a run, tables at the end."""

import io
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich import box, markup
from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Column, Table
from rich.text import Text


def accept_any_terminal() -> None:
    """Replace characters that the terminal cannot show by question marks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


_CONTROLS = {code: repr(chr(code))[1:-1] for code in (*range(0x20), *range(0x7F, 0xA0))}
_BUT_LINES = {code: shown for code, shown in _CONTROLS.items() if chr(code) not in "\t\n"}


def one_line(text: str) -> str:
    """Return a text as one line of a log, with control characters as escapes."""
    return text.translate(_CONTROLS)


def escape(text: str) -> str:
    """Return a text for a console, without effect on markup or on the cursor."""
    return markup.escape(text.translate(_BUT_LINES))


def print_json(content: Mapping[str, Any]) -> None:
    """Print JSON, in characters that any terminal and locale can show."""
    print(json.dumps(content, indent=2, default=lambda number: number.item()))  # of NumPy


Progress = Callable[[int, int, str], None]
"""A function of the number done, the total number, and the unit."""

_SILENT_SECONDS = 2.0
_SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def stage(console: Console, title: str, *, is_reported: bool = True) -> Iterator[Progress]:
    """Show ``title`` during the block, and its duration at the end if it is reported.

    The block may call the yielded function with its progress, which is then shown after two
    seconds: in a terminal on the line of the stage, elsewhere as a line every ten seconds.
    """
    start = time.perf_counter()
    next_line = start + _SILENT_SECONDS
    title = escape(title)
    is_done = threading.Event()

    def write_lines() -> None:
        nonlocal next_line
        wait = _SILENT_SECONDS
        while not is_done.wait(wait):
            wait = _SECONDS_BETWEEN_LINES
            if (now := time.perf_counter()) >= next_line:
                next_line = now + wait
                console.print(f"{title} ... {now - start:.0f} s")

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

        lines = threading.Thread(target=write_lines, daemon=True)
        if not console.is_terminal:
            lines.start()
        try:
            yield show
        finally:
            is_done.set()
            if not console.is_terminal:
                lines.join()
    if is_reported:
        console.print(f"[green]done[/] {title} [dim]{time.perf_counter() - start:.1f} s[/]")


def document_progress(console: Console) -> Bar:
    """Return a bar for the number of documents that are done, which the caller starts."""
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("documents"), TimeRemainingColumn())
    return Bar(*columns, console=console)


@contextmanager
def document_bar(total: int | None, shown: bool | None = None) -> Iterator[Callable[[int], None]]:
    """Show a bar of documents on standard error during the block, after two seconds.

    Args:
        total: number of documents; None if unknown.
        shown: whether to show it; None for a terminal or a notebook only.

    Yields:
        A function of the number of further documents.
    """
    console = Console(stderr=True)
    bar = document_progress(console)
    task = bar.add_task("", total=total)
    begin = time.monotonic() + _SILENT_SECONDS
    is_shown = console.is_terminal if shown is None else shown

    def advance(documents: int) -> None:
        bar.advance(task, documents)
        if is_shown and not bar.live.is_started and time.monotonic() >= begin:
            bar.start()

    try:
        yield advance
    finally:
        if bar.live.is_started:
            bar.stop()


class _Table(Table):
    """A table whose columns have room for each word of up to ``_MAX_WORD`` characters."""

    def add_row(self, *cells: Any, **options: Any) -> None:
        super().add_row(*cells, **options)
        for column, cell in zip(self.columns, cells, strict=False):
            words = Text.from_markup(str(cell)).plain.split()
            sizes = (len(word) for word in words if len(word) <= _MAX_WORD)
            column.min_width = max(column.min_width or 0, *sizes, 0)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.__rich_measure__(console, options).minimum > options.max_width:
            for column in self.columns:  # a cut word is better than a column that is not shown
                column.min_width = None
        return super().__rich_console__(console, options)


_MAX_WORD = 32
"""Longer words, such as paths, are cut where the line ends."""


def plain_table(*headers: str) -> Table:
    """Return an empty table in the common style; long cells wrap instead of being cut."""
    columns = [Column(header, overflow="fold") for header in headers]
    return _Table(*columns, box=box.SIMPLE_HEAD, show_header=any(headers), collapse_padding=True)


def path_title(path: str) -> str:
    """Return the title of the path of an operator, ``fused`` or ``portable``."""
    return "fused kernel" if path == "fused" else "fallback"


def operator_table(operators: Mapping[str, int], paths: Mapping[str, str]) -> Table:
    """Return a table of the custom operators and their kernels on this machine."""
    table = plain_table("operator", "nodes", "path on this machine")
    for op_type, count in operators.items():
        table.add_row(op_type, str(count), path_title(paths[op_type]))
    if not operators:
        table.add_row("none: standard operators only", "", "")
    return table


def size_table(files: Mapping[str, int]) -> Table:
    """Return a table of the files of a bundle."""
    table = plain_table("file", "size")
    table.columns[1].justify = "right"
    for name, size in files.items():
        table.add_row(name, size_text(size))
    return table


def size_text(size: int) -> str:
    """Return the text of a number of bytes, such as ``12 KiB``."""
    return f"{size / 1024:,.0f} KiB" if size >= 1024 else f"{size} B"


def shape_text(shape: Sequence[int]) -> str:
    """Return the text of a shape, such as ``2 x 67``."""
    return " x ".join(map(str, shape))
