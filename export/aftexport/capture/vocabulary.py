"""How many token ids a captured program takes."""

from dataclasses import dataclass

from torch._ops import HigherOrderOperator
from torch.export import ExportedProgram
from torch.fx import Node

from aftexport.capture.id_ranges import IdRanges, Lookup
from aftexport.contract import MAX_VOCABULARY
from aftexport.errors import TraceError, UsageError

MAX_IDS = MAX_VOCABULARY
"""Of a model that takes any id, as where ids are clamped or taken modulo a number."""
_GIVE = "give --vocab-size N, where ids are below N"


@dataclass(frozen=True)
class Vocabulary:
    """The ids of a program.

    Attributes:
        size: ids are below this.
        embedding: name of the parameter that has a row for each id, the one with the fewest
            where there are several; empty where there is none.
    """

    size: int
    embedding: str


def read_vocabulary(program: ExportedProgram, ids: Node, asked: int | None = None) -> Vocabulary:
    """Reads how many ids a program takes from the tables it looks them up in.

    Args:
        program: as captured.
        ids: its input.
        asked: the number of ids that was given; None to take as many as there can be.

    Raises:
        TraceError: where it cannot be told, and none was given.
        UsageError: where more were given than there can be.
    """
    ranges = IdRanges(program, ids)
    most = _most(ranges)
    if most is None and asked is None:
        raise _unknown(ranges.lookups(1), ids)
    if most is not None and asked is not None and asked > most:
        raise UsageError(
            f"--vocab-size {asked} is over the {most} ids the model has rows for.",
            f"Give {most} or less.",
        )
    size = asked or most or 0
    names = program.graph_signature.inputs_to_parameters
    own = [x for x in ranges.lookups(size) if x.index.are_ids and (x.table or "") in names]
    smallest = min(own, key=lambda lookup: lookup.rows, default=None)
    return Vocabulary(size, names[smallest.table or ""] if smallest is not None else "")


def _most(ranges: IdRanges) -> int | None:
    """The most ids that every lookup has rows for; None where that cannot be told."""

    def fits(count: int) -> bool:
        return all(lookup.fits for lookup in ranges.lookups(count))

    if not ranges.lookups(1) or not fits(1):
        return None
    low, high = 1, MAX_IDS + 1  # fits(low), and not fits(high)
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
            f"The model looks its input_ids up inside a block of its forward: {name}.",
            "Take torch.autocast and the like out of forward; --precision says in which "
            "type products are computed.",
        )
    if not lookups:
        return TraceError(
            "The model does not look its input_ids up in an embedding.",
            f"Export models whose first step is an nn.Embedding of input_ids, or {_GIVE}.",
        )
    rows = min(lookup.rows for lookup in lookups if not lookup.fits)
    return TraceError(
        "The model computes with its input_ids before it looks them up, and it cannot be told "
        f"which of them have one of the {rows} rows.",
        f"{_GIVE[0].upper()}{_GIVE[1:]}.",
    )
