"""What people look at: stages as they run, tables at the end, the parity page."""

import html
import io
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from aftexport.engines.engine_file import EngineRecord
from aftexport.engines.tensorrt_runtimes import TITLES
from aftexport.manifest import Manifest
from aftexport.parity import TOLERANCES, Comparison


def accept_any_terminal() -> None:
    """Lets a terminal that lacks a character show a question mark in its place."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


@contextmanager
def stage(console: Console, title: str) -> Iterator[None]:
    """Shows that ``title`` is under way, and how long it took once it is done."""
    start = time.perf_counter()
    title = escape(title)
    with console.status(f"{title} ..."):
        yield
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


WAYS = {"plugin": "plugin", "portable": "portable body"}


def engine_table(record: EngineRecord) -> Table:
    """What a TensorRT engine is."""
    settings = record.settings
    capabilities = ", ".join(f"{c // 10}.{c % 10}" for c in settings.compute_capabilities)
    lengths = ", ".join(map(str, settings.opt_lengths))
    table = plain_table("", "")
    rows = {
        "built by": f"{TITLES[record.runtime]} {record.version}",
        "for": record.gpu or f"compute capability {capabilities}",
        "documents": f"{settings.min_length} to {settings.max_length} tokens, best at {lengths}; "
        f"up to {settings.max_batch} at once",
        "types": ", ".join(f"{name} {kind}" for name, kind in record.types.items()),
        "operators": ", ".join(f"{op} by its {WAYS[way]}" for op, way in record.operators.items()),
        "parity": record.parity,
    }
    for name, value in rows.items():
        table.add_row(name, escape(value))
    return table


def parity_table(results: Sequence[Comparison]) -> Table:
    """Each case's error beside its bound."""
    table = plain_table("parity with PyTorch", "input", "error", "bound", "")
    table.caption = "error: max |output - reference| / max(1, max |reference|), float64 reference"
    table.caption_justify = "left"
    for result in results:
        verdict = "[green]within[/]" if result.passed else "[bold red]OUTSIDE[/]"
        subject = result.case if result.subject == "model" else f"{result.subject}, {result.case}"
        errors = (f"{result.error:.1e}", f"{result.bound:.0e}")
        table.add_row(escape(subject), shape_text(result.shape), *errors, verdict)
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


def write_parity_page(path: Path, manifest: Manifest, results: Sequence[Comparison]) -> None:
    """Writes the parity report as one self-contained HTML file."""
    deferred = manifest.engine.deferred if manifest.engine else ()
    note = "".join(f"<p>Deferred: {html.escape(line)}</p>\n" for line in deferred)
    tolerance = TOLERANCES[manifest.precision]
    verdict = "within tolerance" if all(r.passed for r in results) else "outside tolerance"
    if not results:
        verdict = "not checked"
    rows = "\n".join(
        f"<tr class={'ok' if r.passed else 'bad'}><td>{html.escape(r.subject)}</td>"
        f"<td>{html.escape(r.case)}</td><td>{shape_text(r.shape)}</td><td>{r.error:.2e}</td>"
        f"<td>{r.bound:.0e}</td><td>{r.label_flips}</td>"
        f"<td>{'within' if r.passed else 'OUTSIDE'}</td></tr>"
        for r in results
    )
    versions = html.escape(", ".join(f"{k} {v}" for k, v in sorted(manifest.versions.items())))
    path.write_text(
        f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Parity: {verdict}</title>
<style>
body {{ font: 1rem/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; }}
body {{ padding: 0 1rem; }}
table {{ border-collapse: collapse; display: block; overflow-x: auto; }}
th, td {{ text-align: left; padding: .25rem .75rem; border-bottom: 1px solid #ccc; }}
.bad td {{ background: #fdd; font-weight: bold; }}
</style>
<h1>Parity: {verdict}</h1>
<p>The exported model against PyTorch in float64, {html.escape(manifest.precision)}, {versions}.</p>
<p>Error: max |output &minus; reference| / max(1, max |reference|). Bound {tolerance.bound:.0e}:
{html.escape(tolerance.reason)}.</p>
{note}<table>
<thead><tr><th>subject<th>case<th>input<th>error<th>bound<th>label flips<th>verdict</tr></thead>
<tbody>
{rows}
</tbody>
</table>
</html>
""",
        "utf-8",
    )
