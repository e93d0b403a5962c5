"""A batch run: from a folder of documents to a file of answers."""

import logging
import time
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow as pa
from rich.console import Console

from aftexport.bundle.bundle import Bundle
from aftexport.errors import AftexportError
from aftexport.system.console import document_progress, escape
from aftexport.system.process import Interruption
from aftserve.batch import documents, output
from aftserve.batch.answering import OfflineClassifier
from aftserve.batch.documents import Documents
from aftserve.batch.output_file import OutputError, replacing
from aftserve.ray.cluster import check_gpus, connected
from aftserve.settings import Settings

_OBJECT_STORE_MIB = 512
_READERS = 1
"""CPUs that a Ray on this machine has beside the actors' CPUs, to read Parquet."""
_MAX_DEATHS = 3


class RunError(AftexportError):
    """The run did not finish; nothing was written."""

    exit_code = 1


class Deaths:
    """A counter of the actors that died: Ray Data itself restarts them without a limit."""

    def __init__(self) -> None:
        self._count = 0

    def add(self) -> int:
        """Count another death, and return the number of deaths."""
        self._count += 1
        return self._count


class Actor:
    """A process that holds the model and classifies block after block."""

    def __init__(self, settings: Settings, digest: str, columns: pa.Schema, deaths: Any) -> None:
        import ray

        again = ray.get_runtime_context().was_current_actor_reconstructed
        if again and ray.get(deaths.add.remote()) > _MAX_DEATHS:
            raise RunError(
                "The process that holds the model dies again and again, for lack of memory or "
                "because of a document.",
                "Give the process more memory, or remove the document.",
            )
        self._classifier = OfflineClassifier(settings, digest)
        self._max_characters = settings.max_characters
        self._columns = columns
        self._marks: dict[str, Any] = {
            "policy": self._classifier.classifier.policy,
            "bundle": digest,
        }

    def __call__(self, block: pa.Table) -> pa.Table:
        """Return the rows of a block's documents."""
        texts = documents.texts_of(block, self._max_characters)
        outcomes = list(self._classifier.answer(texts, documents.fields_of(block)))
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
    """Classify documents; return the number of those with an error in place of an answer."""
    # Only a complete output replaces an earlier file. Ray's callbacks may swallow the exception of
    # an interruption.
    bundle = Bundle.open(settings.bundle)
    found = found.with_inputs(bundle.manifest.columns)
    columns = output.schema(
        bundle.manifest.heads,
        found.ids,
        bundle.manifest.calibration,
        has_windows=bundle.manifest.windows is not None and settings.long_documents == "exact",
    )
    threads = settings.threads or 1
    settings = settings.model_copy(update={**settings.absolute_paths, "threads": threads})
    start = time.monotonic()
    cluster = connected(
        address, object_store_mib=_OBJECT_STORE_MIB, cpus=actors * threads + _READERS, logs=False
    )
    failed = None
    try:
        # The import may swallow an interruption, so check for one before Ray's long start.
        import_module("ray")
        interruption.check()
        with cluster:
            interruption.check()
            check_gpus(actors, _gpus(settings), f"--actors {actors}")
            _configure()
            rows = _answers(found, settings, bundle.digest, columns, actors)
            failed = _write(rows, columns, found, out, console, interruption)
    except KeyboardInterrupt:
        if failed is None:  # otherwise the output is complete, and only Ray's end was interrupted
            raise
    _summarize(console, found, out, failed, time.monotonic() - start)
    return failed


def _summarize(console: Console, found: Documents, out: Path, failed: int, seconds: float) -> None:
    console.print(
        f"{found.count:,} documents in {seconds:.1f} s, {failed:,} of them without an answer: "
        f"{escape(str(out))}",
        soft_wrap=True,
    )


def _answers(
    found: Documents, settings: Settings, digest: str, columns: pa.Schema, actors: int
) -> Iterable[pa.Table]:
    """Return the tables of answers, in order, as actors classify the documents."""
    import ray

    deaths = ray.remote(num_cpus=0)(Deaths).remote()
    answered = found.blocks().map_batches(
        Actor,
        fn_constructor_args=(settings, digest, columns, deaths),
        batch_format="pyarrow",
        batch_size=None,
        compute=ray.data.ActorPoolStrategy(size=actors),
        num_cpus=settings.threads,
        num_gpus=_gpus(settings),
    )
    rows: Iterable[pa.Table] = answered.iter_batches(batch_size=None, batch_format="pyarrow")
    return rows


def _gpus(settings: Settings) -> int:
    """Return the GPUs of an actor: without one reserved, Ray hides the GPUs."""
    return int(settings.provider == "cuda")


def _write(
    answered: Iterable[pa.Table],
    columns: pa.Schema,
    found: Documents,
    out: Path,
    console: Console,
    interruption: Interruption,
) -> int:
    """Write the output before Ray ends, because a signal during Ray's end would lose it."""
    failed = 0
    with document_progress(console) as progress:
        task = progress.add_task("documents", total=found.count)
        try:
            # Closing writes the rest, and the disk may be full: keep it within the try block.
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
                        f"Ray returned {writer.rows} of {found.count} documents.",
                        "Nothing was written.",
                    )
        except OSError as error:
            raise OutputError(f"--output {out}", error) from error
    return failed


def _arriving(answered: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Yield the rows from Ray, whose errors must not count as errors of the output."""
    import ray

    try:
        yield from answered
    except (OSError, ray.exceptions.RayError) as error:
        raise RunError(_reason(error), "Nothing was written.") from error


def _configure() -> None:
    """Configure Ray Data to keep the order of the rows, and to print nothing."""
    from ray.data import DataContext

    context = DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)


def _reason(error: Exception) -> str:
    """Return the last line of an error, where Ray names the original error."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"The run failed: {lines[-1].strip() if lines else type(error).__name__}"
