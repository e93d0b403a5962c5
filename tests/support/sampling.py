"""Run a fixed part of the large tables of cases, or with AFT_TEST_ALL=1 all of them.

``@pytest.mark.table(keep=0.25)`` lets a test run a quarter of its cases. A hash of each case's name
chooses them, so that every machine runs the same ones. Every value of every parameter keeps a case.
Where a parameter only numbers the cases, ``by`` gives the values instead:

    @pytest.mark.table(keep=0.25, by=lambda name: LAYERS[name].operator)

A test that runs a program over a table in C++ counts those cases by the fixture ``count_cases``.
"""

import hashlib
import math
import os
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import pytest

T = TypeVar("T")
Describe = Callable[[T], tuple[str, set[Hashable]]]
"""Returns a case's name and the values of which each keeps a case."""

RUN_ALL = "AFT_TEST_ALL" in os.environ
PROPERTY = "table cases"
_COLLECTED = pytest.StashKey[tuple[int, int]]()
_COUNTED = pytest.StashKey[list[tuple[int, int]]]()


def any_case(**_: object) -> None:
    """Give all cases one value, as ``by`` of a table whose cases stand for each other."""


def fewer(count: int, keep: float = 0.25) -> int:
    """Return how many examples a random test draws: all of ``count``, or a part of them."""
    return count if RUN_ALL else math.ceil(count * keep)


@pytest.fixture
def count_cases(record_property: Callable[[str, object], None]) -> Callable[[int, int], None]:
    """Count the cases that a program ran, and the cases that it has."""
    return lambda ran, total: record_property(PROPERTY, (ran, total))


def part_of(cases: Sequence[T], describe: Describe[T], keep: float = 0.25) -> list[T]:
    """Choose cases by hashes of their names, so that each of their values keeps one."""
    if RUN_ALL:
        return list(cases)
    described = [(*describe(case), case) for case in cases]
    described.sort(key=lambda entry: hashlib.sha256(entry[0].encode()).digest())
    seen: set[Hashable] = set()
    needed, others = [], []
    for _, values, case in described:
        (others if values <= seen else needed).append(case)
        seen |= values
    return [*needed, *others[: max(0, math.ceil(keep * len(cases)) - len(needed))]]


def _describe(item: pytest.Function) -> tuple[str, set[Hashable]]:
    """Name a case without its file, so that a test keeps its cases when it moves."""
    by = _mark(item).kwargs.get("by")
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    if by:
        return item.name, {by(**parameters)}
    # Text stands for lists, and keeps 1, 1.0 and True apart.
    return item.name, {(n, v if callable(v) else repr(v)) for n, v in parameters.items()}


def _mark(item: pytest.Item) -> pytest.Mark:
    mark = item.get_closest_marker("table")
    assert mark is not None
    return mark


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the other cases, after -k and -m: a case that is asked for by its name runs."""
    tables = defaultdict[tuple[object, str], list[pytest.Function]](list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("table"):
            tables[item.parent, item.originalname].append(item)
    kept: set[pytest.Item] = set()
    for cases in tables.values():
        kept.update(part_of(cases, _describe, _mark(cases[0]).kwargs["keep"]))
    dropped = {case for cases in tables.values() for case in cases} - kept
    items[:] = [item for item in items if item not in dropped]
    if dropped:
        config.hook.pytest_deselected(items=list(dropped))
    config.stash[_COLLECTED] = len(kept), len(kept) + len(dropped)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell xdist's controller, which collects nothing itself."""
    output: dict[str, object] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output[PROPERTY] = session.config.stash.get(_COLLECTED, (0, 0))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    """Take what a worker has collected; all workers have collected the same."""
    output = getattr(node, "workeroutput", {})
    if PROPERTY in output:
        node.config.stash[_COLLECTED] = output[PROPERTY]  # type: ignore[attr-defined]


def pytest_configure(config: pytest.Config) -> None:
    """Begin to count."""
    config.stash[_COUNTED] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in one line how many cases of the tables ran."""
    config = terminalreporter.config
    counts = [config.stash.get(_COLLECTED, (0, 0))]
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            counts += [tuple(v) for name, v in report.user_properties if name == PROPERTY]
    ran, total = (sum(numbers) for numbers in zip(*counts, strict=True))
    if ran < total:
        terminalreporter.write_line(
            f"ran {ran:,} of {total:,} table cases; make test-all runs all of them"
        )
