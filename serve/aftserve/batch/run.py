"""From a place with documents to a file with their answers."""

import logging
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from aftexport.bundle import Bundle
from aftexport.errors import AftexportError
from aftexport.interruption import Interruption
from aftexport.report import escape
from aftserve.batch import documents, output
from aftserve.batch.answering import OfflineClassifier
from aftserve.batch.documents import Documents
from aftserve.batch.leftovers import replacing
from aftserve.ray.cluster import connected
from aftserve.settings import Settings

_OBJECT_STORE_MIB = 512
_READERS = 1
"""CPUs of an own Ray beside those of the actors: for what reads Parquet, mostly idle."""
_MOST_DEATHS = 3


class RunError(AftexportError):
    """The run did not come to its end; nothing was written."""

    exit_code = 1


class Deaths:
    """Counts the actors that died: Ray Data starts them again without end."""

    def __init__(self) -> None:
        self._count = 0

    def another(self) -> int:
        """How many there are, with this one."""
        self._count += 1
        return self._count


class Actor:
    """Holds the model in a process of its own, and answers block after block."""

    def __init__(self, settings: Settings, digest: str, columns: pa.Schema, deaths: Any) -> None:
        import ray

        again = ray.get_runtime_context().was_current_actor_reconstructed
        if again and ray.get(deaths.another.remote()) > _MOST_DEATHS:
            raise RunError(
                "The process that holds the model dies again and again, by lack of memory or by "
                "a document.",
                "Give it more, or look for the document.",
            )
        self._classifier = OfflineClassifier(settings, digest)
        self._most_characters = settings.max_characters
        self._columns = columns
        self._marks: dict[str, Any] = {"policy": settings.long_documents, "bundle": digest}

    def __call__(self, block: pa.Table) -> pa.Table:
        """The rows of a block's documents."""
        texts = documents.texts_of(block, self._most_characters)
        outcomes = self._classifier.answer(texts)
        ids = block["id"] if "id" in block.column_names else None
        return output.table(ids, outcomes, self._columns, **self._marks)


def run(
    settings: Settings,
    found: Documents,
    out: Path,
    *,
    actors: int,
    address: str | None,
    console: Console,
    interruption: Interruption,
) -> int:
    """Classifies documents; returns how many have an error in place of an answer.

    Args:
        settings: of the bundle and its engine.
        found: the documents.
        out: the file to write; what stands there goes only once the new one is whole.
        actors: processes that hold the model.
        address: as ``resolve`` has it.
        console: where progress goes.
        interruption: whose exception may be lost in a callback of Ray's.

    Raises:
        AftexportError: where it cannot be run.
        RunError: where it does not come to its end.
    """
    bundle = Bundle.open(settings.bundle)
    columns = output.schema(bundle.manifest.labels, found.ids)
    threads = settings.threads or 1
    settings = settings.model_copy(update={**settings.absolute_paths, "threads": threads})
    start = time.monotonic()
    cluster = connected(
        address, object_store_mib=_OBJECT_STORE_MIB, cpus=actors * threads + _READERS, logs=False
    )
    failed = None
    try:
        import ray

        interruption.check()  # an import may lose it, and Ray takes long to start
        with cluster:
            interruption.check()
            _configure()
            deaths = ray.remote(num_cpus=0)(Deaths).remote()
            answered = found.blocks().map_batches(
                Actor,
                fn_constructor_args=(settings, bundle.digest, columns, deaths),
                batch_format="pyarrow",
                batch_size=None,
                compute=ray.data.ActorPoolStrategy(size=actors),
                num_cpus=threads,
            )
            rows = answered.iter_batches(batch_size=None, batch_format="pyarrow")
            failed = _write(rows, columns, found, out, console, interruption)
    except KeyboardInterrupt:
        if failed is None:  # else all is there, and Ray alone was ended before its time
            raise
    seconds = time.monotonic() - start
    console.print(
        f"{found.count:,} documents in {seconds:.1f} s, {failed:,} of them without an answer: "
        f"{escape(str(out))}",
        soft_wrap=True,
    )
    return failed


def _write(
    answered: Iterable[pa.Table],
    columns: pa.Schema,
    found: Documents,
    out: Path,
    console: Console,
    interruption: Interruption,
) -> int:
    """Puts the file into its place before Ray ends, which would lose it to a signal meanwhile."""
    failed = 0
    with _progress(console) as progress:
        task = progress.add_task("documents", total=found.count)
        try:
            # Within: what is left is written when they are closed, and the disk may be full.
            with (
                replacing(out) as aside,
                output.Writer(aside, out, columns, numbered=found.ids is None) as writer,
            ):
                for rows in _arriving(answered):
                    writer.write(rows)
                    failed += len(rows) - rows[output.ERROR].null_count
                    progress.advance(task, len(rows))
                    interruption.check()
                if writer.rows != found.count:
                    raise RunError(
                        f"{writer.rows} of {found.count} documents came back.",
                        "Nothing was written.",
                    )
        except OSError as error:
            raise output.OutputError(out, error) from error
    return failed


def _arriving(answered: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Rows as Ray hands them out; what fails there is none of the output's errors."""
    import ray

    try:
        yield from answered
    except (OSError, ray.exceptions.RayError) as error:
        raise RunError(_reason(error), "Nothing was written.") from error


def _progress(console: Console) -> Progress:
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("documents"), TimeRemainingColumn())
    return Progress(*columns, console=console)


def _configure() -> None:
    """Rows in the order of their documents, and no word of Ray Data's beside what is raised."""
    from ray.data import DataContext

    context = DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)


def _reason(error: Exception) -> str:
    """The last line of what it says: of Ray's errors, it names the one that began it."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"The run failed: {lines[-1].strip() if lines else type(error).__name__}"
