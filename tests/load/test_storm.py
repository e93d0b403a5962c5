"""Short storms, and faults that they must detect."""

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from load import memory, storm
from load.documents import BOUND
from load.every_head import Document, bare_answers, export_bundles, make_documents
from load.interfaces import INTERFACES
from load.storm_clients import is_answer
from load.test_load import SWAPPING

# A server that accepts every key that its file has ever had.
KEEPING_KEYS = memory.trimming_server("""
from aftserve.api.api_keys import Keys

replace = Keys.replace

def keeping(self, keys):
    current = keys._digests.values()
    digests = {
        f"{name}-{len(self._digests)}": one
        for name, one in self._digests.items() if one not in current
    }
    replace(self, keys)
    self._digests |= digests

Keys.replace = keeping
""")
# A server that answers by its first bundle after every reload.
KEEPING_BUNDLES = memory.trimming_server("""
from aftserve.serving.service import Service

activate = Service.activate

async def keeping(self, active):
    first = self.parity.active
    await activate(self, active)
    self.parity.active = first

Service.activate = keeping
""")
# A server that counts some responses twice.
COUNTING_TWICE = memory.trimming_server("""
from aftserve.http.access_log import AccessLogMiddleware

call = AccessLogMiddleware.__call__

async def counting(self, scope, receive, send):
    await call(self, scope, receive, send)
    if scope["path"] == "/embed":
        self._responses.labels("/embed", "200", "a").inc()

AccessLogMiddleware.__call__ = counting
""")


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return export_bundles(tmp_path_factory.mktemp("storm"))


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    return make_documents(30, longest=3000)


def run(bundles: list[Path], documents: list[Document], folder: Path, **plan: Any) -> storm.Storm:
    size = {"rounds": 1, "requests": 240, "connections": 12} | plan
    return storm.run(bundles, documents, folder, storm.Plan(**size))


def test_bare_answers_are_distinct(bundles: list[Path], documents: list[Document]) -> None:
    """A swapped answer could pass for the right one otherwise."""
    answers = [one for bundle in bundles for one in bare_answers(bundle, documents, 1)[1]]
    for one, other in combinations([answer["topic"]["columns"] for answer in answers], 2):
        assert not np.allclose(one, other, rtol=0, atol=BOUND)


def test_comparison_sees_last_bit() -> None:
    found = {"topic": {"columns": np.array([0.25, 0.5], np.float32)}}
    expected = {"topic": {"columns": [0.25, 0.5], "label": "a"}, "bundle": "b"}
    assert is_answer(found, expected, 0)
    found["topic"]["columns"][1] = np.nextafter(np.float32(0.5), np.float32(1))
    assert not is_answer(found, expected, 0)
    assert is_answer(found, expected, BOUND)
    found["topic"]["columns"][1] = np.nan
    assert not is_answer(found, expected, BOUND)
    assert not is_answer({}, expected, BOUND)
    assert not is_answer({"bundle": "c"}, expected, BOUND)


@pytest.mark.parametrize("several_models", [False, True])
@pytest.mark.parametrize("shares_runs", [False, True])
def test_storm_finds_no_fault(
    shares_runs: bool,
    several_models: bool,
    bundles: list[Path],
    documents: list[Document],
    tmp_path: Path,
) -> None:
    found = run(
        bundles, documents, tmp_path, shares_runs=shares_runs, several_models=several_models
    )
    assert found.faults == []
    assert all(found.answered[one.name] for one in INTERFACES)
    assert sum(found.statuses.values()) == 240
    assert found.statuses["left"] > 20
    assert found.statuses["401"] > 0
    assert found.reloads > 0
    assert found.rotations > 0
    assert (found.returns > 0) == several_models


@pytest.mark.parametrize(
    ("program", "fault"),
    [
        (SWAPPING, "wrong answer for documents"),
        (KEEPING_KEYS, "is accepted after the key"),
        (KEEPING_BUNDLES, "wrong answer for documents"),
        (COUNTING_TWICE, "responses 200 at /embed, the log has"),
    ],
    ids=["answers swapped", "keys kept", "bundle kept", "counted twice"],
)
def test_storm_finds_fault(
    program: tuple[str, str],
    fault: str,
    bundles: list[Path],
    documents: list[Document],
    tmp_path: Path,
) -> None:
    found = run(bundles, documents, tmp_path, program=program)
    assert any(fault in one for one in found.faults), found.faults
