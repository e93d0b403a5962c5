"""``python -m benchmarks``: the core operators, whole models, or documents in chunks."""

import argparse
from pathlib import Path

from rich.console import Console

from benchmarks import setup
from benchmarks.workloads import OP_TYPES, SOFTMAX


def main() -> None:
    """Runs a benchmark; writes its rows as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    add = parser.add_argument
    kind = parser.add_mutually_exclusive_group().add_argument
    kind("--model", action="store_true", help="a whole model in place of the core operators")
    kind("--chunks", action="store_true", help="documents longer than memory, against whole ones")
    kind("--recurrent", action="store_true", help="the update rules of recurrent linear attention")
    kind("--recognized", action="store_true", help="other people's layers, fused and as they were")
    kind("--encoders", action="store_true", help="encoders of transformers, by ModernBERT's shape")
    kind(
        "--quick",
        action="store_true",
        help="core operators; under a minute once torch.compile has its cache",
    )
    add(
        "--mechanism",
        nargs="+",
        choices=[*OP_TYPES, SOFTMAX],
        help="only these (default: all; softmax, a model for scale, only with --model)",
    )
    add(
        "--tokens",
        type=int,
        nargs="+",
        help="of the documents (default: 4096 16384, and 65536 262144 without --quick; with "
        "--model 32 to 1024 by powers of two, 4096 and 16384; with --chunks always two, 65536 "
        "1000000: the first runs whole too; with --encoders 128 512 2048 8192)",
    )
    add("--shape", nargs="+", choices=["modernbert", "bert"], help="of --encoders (default: both)")
    add("--layers", type=int, help="of --encoders (default: 22 for modernbert, 12 for bert)")
    add("--contender", nargs="+", help="only these (default: all)")
    add(
        "--neighbour",
        action="store_true",
        help="with --model, run also beside a program that keeps one core half busy",
    )
    add("--dim", type=int, default=256, help="channels (default: %(default)s)")
    add("--threads", type=int, default=2, help="of every contender (default: %(default)s)")
    add(
        "--rounds",
        type=int,
        help="of each contender (default: 11; 3 with --quick, --chunks or --encoders, 7 with "
        "--model or --recognized)",
    )
    add(
        "--out",
        type=Path,
        help="for the rows (default: build/bench.json, bench_model.json, bench_chunks.json, "
        "bench_recurrent.json, bench_recognized.json or bench_encoders.json)",
    )
    add(
        "--record",
        action="store_true",
        help="write the rows to this processor's record in tests/benchmarks/records",
    )
    add(
        "--replace",
        action="store_true",
        help="with --record, drop the rows of another date, commit, version or contender",
    )
    options = parser.parse_args()
    if options.recognized and (options.record or options.replace):
        parser.error("--record: expected no --recognized, which has no record")
    if SOFTMAX in (options.mechanism or ()) and not options.model:
        parser.error("--mechanism softmax: expected --model with it")
    if (options.shape or options.layers) and not options.encoders:
        parser.error("--shape and --layers: expected --encoders with them")
    if options.neighbour and not options.model:
        parser.error("--neighbour: expected --model with it")
    if options.chunks and options.tokens and len(options.tokens) != 2:
        parser.error("--chunks: give two --tokens")
    setup.prepare(options.threads)
    # Imported once the process is prepared.
    from benchmarks import chunks, encoders, model, operators, recognized
    from benchmarks.record import RecordError
    from benchmarks.recurrent import run as recurrent

    if options.model:
        chosen = model
    elif options.chunks:
        chosen = chunks
    elif options.recurrent:
        chosen = recurrent
    elif options.recognized:
        chosen = recognized
    elif options.encoders:
        chosen = encoders
    else:
        chosen = operators
    if unknown := set(options.contender or ()) - set(chosen.CONTENDERS):
        known = ", ".join(chosen.CONTENDERS) or "none"
        parser.error(f"--contender {' '.join(sorted(unknown))}: known are {known}")
    try:
        chosen.run(options, Console(width=180))
    except RecordError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
