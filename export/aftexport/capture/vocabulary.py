"""The number of token ids that a captured program accepts."""

from dataclasses import dataclass

from torch.export import ExportedProgram
from torch.fx import Node

from aftexport.capture.id_ranges import IdRanges, Lookup
from aftexport.errors import TraceError, UsageError
from aftexport.extra_inputs import ExtraInput
from aftexport.system.contract import MAX_VOCABULARY
from aftexport.system.internals.torch_operators import HigherOrderOperator

MAX_IDS = MAX_VOCABULARY
"""The number of ids for a model that accepts every id, e.g. by clamping or by a modulus."""
_GIVE = "give --vocab-size N, with every id below N"


@dataclass(frozen=True)
class Vocabulary:
    """The ids of a program.

    Attributes:
        size: the number of ids; every id is below it.
        embedding: the name of the parameter with a row for each id, and of several the one with
            the fewest rows; empty if there is none.
    """

    size: int
    embedding: str


def read_vocabulary(
    program: ExportedProgram, ids: Node, vocab_size: int | None = None
) -> Vocabulary:
    """Return the ids that a program accepts, by the tables in which it looks them up.

    Args:
        program: the captured program.
        ids: the node of the input ``input_ids``.
        vocab_size: the number of ids by ``--vocab-size``; None for the maximum.

    Raises:
        TraceError: if ``vocab_size`` is None and the maximum is unknown.
        UsageError: if ``vocab_size`` exceeds the maximum.
    """
    ranges = IdRanges(program, ids)
    max_ids = _max_ids(ranges)
    if max_ids is None and vocab_size is None:
        raise _unknown(ranges.lookups(1), ids)
    if max_ids is not None and vocab_size is not None and vocab_size > max_ids:
        raise UsageError(
            f"--vocab-size must be at most the model's {max_ids} ids, got {vocab_size}.",
            f"Give {max_ids} or less.",
        )
    size = vocab_size or max_ids or 0
    names = program.graph_signature.inputs_to_parameters
    own = [x for x in ranges.lookups(size) if x.index.are_ids and (x.table or "") in names]
    smallest = min(own, key=lambda lookup: lookup.rows, default=None)
    return Vocabulary(size, names[smallest.table or ""] if smallest is not None else "")


def read_maximum(program: ExportedProgram, node: Node, extra: ExtraInput) -> int:
    """Return the largest integer that a program accepts for an extra input.

    Args:
        program: the captured program.
        node: the node of the input.
        extra: the input, with the maximum by ``--input``, or None for that of the tables.

    Raises:
        TraceError: if the maximum is not given and unknown.
        UsageError: if the given one exceeds the rows of a table.
    """
    max_ids = _max_ids(IdRanges(program, node))
    if extra.maximum is None and max_ids is None:
        raise TraceError(
            f"Expected a lookup of the input {extra.name!r} in a table, got none, so its largest "
            "integer is unknown.",
            f"End its kind in :N for integers below N, as in --input {extra.name}=category:N.",
        )
    if max_ids is None or (extra.maximum is not None and extra.maximum < max_ids):
        assert extra.maximum is not None  # checked above
        return extra.maximum
    if extra.maximum is not None:
        raise UsageError(
            f"--input {extra.name} must be integers below {max_ids}, the rows of the model's "
            f"table, got {extra.maximum + 1}.",
            f"Give {max_ids} or less.",
        )
    return max_ids - 1


def _max_ids(ranges: IdRanges) -> int | None:
    """Return the maximum number of ids for which every lookup has rows; None if it is unknown."""

    def fits(count: int) -> bool:
        return all(lookup.fits for lookup in ranges.lookups(count))

    if not ranges.lookups(1) or not fits(1):
        return None
    low, high = 1, MAX_IDS + 1  # fits(low) and not fits(high)
    if fits(MAX_IDS):
        return MAX_IDS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _unknown(lookups: list[Lookup], ids: Node) -> TraceError:
    blocks = [n.target for n in ids.users if isinstance(n.target, HigherOrderOperator)]
    if blocks and not lookups:
        name = str(blocks[0]).removeprefix("wrap_with_")
        return TraceError(
            "Expected a lookup of input_ids in the forward itself, got one inside a block of "
            f"its forward: {name}.",
            "Remove blocks such as torch.autocast from forward; choose the type of products by "
            "--precision.",
        )
    if not lookups:
        return TraceError(
            "Expected a model that looks its input_ids up in an embedding, got none.",
            f"Export models whose first step is an nn.Embedding of input_ids, or {_GIVE}. A model "
            "of features needs --features N.",
        )
    rows = min(lookup.rows for lookup in lookups if not lookup.fits)
    return TraceError(
        "Expected a lookup of input_ids themselves, got one of numbers computed from them, whose "
        f"range against the {rows} rows is unknown.",
        f"{_GIVE[0].upper()}{_GIVE[1:]}.",
    )
