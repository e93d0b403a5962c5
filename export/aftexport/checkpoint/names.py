"""Names of weights, without what wrappers of modules put into them."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aftexport.errors import CheckpointError

COMPILED = "_orig_mod"
"""The name that torch.compile gives the module it wraps."""
_WRAPPERS = frozenset(
    {COMPILED, "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_fpw_module"}
)
"""Such names of torch.compile, activation checkpointing, and both kinds of FSDP."""
_PARALLEL = "module"
"""That of DataParallel and DistributedDataParallel, which a model's own part may have, too."""


def unwrapped_name(name: str) -> str:
    """Return a weight's name without those of wrappers, of the module or of a part of it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


@dataclass(frozen=True)
class Match:
    """The weights of a file under the names of a module.

    Attributes:
        wanted: the module's own name of each weight, by the name to look for in ``given``.
        given: the weights of the file, by name without the prefix.
        prefix: the part before each name, such as a trainer's attribute for the module.
        left_out: the names of the file without that prefix.
    """

    wanted: Mapping[str, str]
    given: Mapping[str, Any]
    prefix: str
    left_out: Sequence[str]


def match(path: Path, own: Collection[str], given: Mapping[str, Any]) -> Match:
    """Match the names in a file with a module's, whatever either was wrapped in.

    Raises:
        CheckpointError: if the file has weights of several such modules.
    """
    found = [_matched(path, own, given, form) for form in (unwrapped_name, _without_parallel)]
    return max((m for m in found if m is not None), key=lambda m: len(m.wanted.keys() & m.given))


def _matched(
    path: Path, own: Collection[str], given: Mapping[str, Any], form: Callable[[str], str]
) -> Match | None:
    """A match of names in a form; None where two names have one form."""
    wanted = {form(name): name for name in own}
    named = {form(name): value for name, value in given.items()}
    if form is _without_parallel and (len(wanted), len(named)) != (len(own), len(given)):
        return None
    prefix = _prefix(path, wanted, named)
    left_out = [name for name in named if not name.startswith(prefix)]
    kept = {n.removeprefix(prefix): value for n, value in named.items() if n.startswith(prefix)}
    return Match(wanted, kept, prefix, left_out)


def _without_parallel(name: str) -> str:
    """A name without DistributedDataParallel of a part; that of the whole module is a prefix."""
    first, *parts = unwrapped_name(name).split(".")
    return ".".join((first, *(part for part in parts if part != _PARALLEL)))


def _prefix(path: Path, expected: Collection[str], given: Collection[str]) -> str:
    """What stands before the module's own names in those of what holds it; empty for nothing."""
    found = Counter(
        name.removesuffix(own) for name in given for own in _endings(name) if own in expected
    )
    most = max(found.values(), default=0)
    if "" in found or most * 2 <= len(expected):
        return ""
    prefixes = [prefix for prefix, count in found.items() if count == most]
    if len(prefixes) > 1:
        raise CheckpointError(
            path,
            f"it holds weights for the module under {listed(prefixes)}",
            "Save the state_dict() of one of them alone.",
        )
    return prefixes[0]


def _endings(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[i:]) for i in range(len(parts))]


def listed(names: Sequence[str], most: int = 8) -> str:
    """Return names as a list in a sentence, the first of many."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
