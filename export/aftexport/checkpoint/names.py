"""Names of weights, without the parts that wrappers of modules add."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aftexport.errors import CheckpointError

COMPILED = "_orig_mod"
"""The name of the wrapped module in torch.compile."""
_WRAPPERS = frozenset(
    {COMPILED, "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_fpw_module"}
)
"""Names of the wrapped module in torch.compile, activation checkpointing and both kinds of FSDP."""
_PARALLEL = "module"
_MAX_LISTED = 8
"""The name in DataParallel and DistributedDataParallel, which a model's own part may also have."""


def unwrapped_name(name: str) -> str:
    """Return a weight's name without the names of wrappers around the module or its parts."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


@dataclass(frozen=True)
class Match:
    """The weights of a file by name without ``prefix``, and the module's own name of each."""

    own_names: Mapping[str, str]
    weights: Mapping[str, Any]
    prefix: str
    left_out: Sequence[str]


def match(path: Path, own: Collection[str], state: Mapping[str, Any]) -> Match:
    """Match the names in a file with a module's, regardless of wrappers around either.

    Raises:
        CheckpointError: if the file has weights of several such modules.
    """
    matches = [_match_by(path, own, state, form) for form in (unwrapped_name, _without_parallel)]
    return max(
        (m for m in matches if m is not None), key=lambda m: len(m.own_names.keys() & m.weights)
    )


def _match_by(
    path: Path, own: Collection[str], state: Mapping[str, Any], form: Callable[[str], str]
) -> Match | None:
    """Return the match of names in a form; None if two names have one form."""
    own_names = {form(name): name for name in own}
    named = {form(name): value for name, value in state.items()}
    if form is _without_parallel and (len(own_names), len(named)) != (len(own), len(state)):
        return None
    prefix = _prefix(path, own_names, named)
    left_out = [name for name in named if not name.startswith(prefix)]
    kept = {n.removeprefix(prefix): value for n, value in named.items() if n.startswith(prefix)}
    return Match(own_names, kept, prefix, left_out)


def _without_parallel(name: str) -> str:
    """Return a name without DistributedDataParallel of a part; the prefix has that of the whole."""
    first, *parts = unwrapped_name(name).split(".")
    return ".".join((first, *(part for part in parts if part != _PARALLEL)))


def _prefix(path: Path, expected: Collection[str], names: Collection[str]) -> str:
    """Return the prefix of the module's own names in a file; empty without a prefix."""
    counts = Counter(
        name.removesuffix(own) for name in names for own in _endings(name) if own in expected
    )
    max_count = max(counts.values(), default=0)
    if "" in counts or max_count * 2 <= len(expected):
        return ""
    prefixes = [prefix for prefix, count in counts.items() if count == max_count]
    if len(prefixes) > 1:
        raise CheckpointError(
            path,
            f"expected one set of weights for the module, got several, under {listed(prefixes)}",
            "Save the state_dict() of only one of them.",
        )
    return prefixes[0]


def _endings(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[i:]) for i in range(len(parts))]


def listed(names: Sequence[str]) -> str:
    """Return the first names as a list in a sentence, with the number of others."""
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more
