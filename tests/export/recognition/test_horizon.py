"""A formula reads a small part of any graph, so chains of any depth are read in time."""

import onnx_ir as ir
import pytest
from sampling import any_case

from aftexport.recognition import algebra
from aftexport.recognition.graph.normalize import normalize
from aftexport.recognition.read import reader
from aftexport.recognition.recognizer import recognize

from .chains import CHAINS, Graph, model_of


def computations(name: str, depth: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Return the numbers of computed keys and of nodes."""
    count = 0
    compute = algebra.compute_text

    def counted(*arguments: object) -> str:
        nonlocal count
        count += 1
        return compute(*arguments)  # type: ignore[arg-type]

    graph = normalize(model_of(CHAINS[name], depth))
    nodes = len(list(graph.graph))
    with monkeypatch.context() as patch:
        patch.setattr(algebra, "compute_text", counted)
        assert "AftSimple" in [match.operator for match in recognize(graph).matches]
    return count, nodes


@pytest.mark.table(keep=0.5, by=any_case)
@pytest.mark.parametrize("name", CHAINS)
def test_keys_are_near_linear_in_nodes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_READS", 48)
    monkeypatch.setattr(reader, "READS_PER_VALUE", 3)
    monkeypatch.setattr(reader, "MAX_LEVELS", 16)
    counts = [computations(name, depth, monkeypatch) for depth in (1, 4, 8, 16)]
    for count, nodes in counts:
        assert count < 400 * nodes
    _, (quarter, _), (half, _), (whole, _) = counts
    # Twice the chain is about twice the work: the second half costs as much as the first.
    assert whole - half < 2.5 * max(half - quarter, 50)


@pytest.mark.parametrize("name", ["pseudo_inverse", "softmax_product", "attention"])
def test_mechanism_above_chain_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    count, nodes = computations(name, 4, monkeypatch)
    assert count < 3000 * nodes


@pytest.mark.parametrize(
    ("name", "depth"), [("elementwise", 1000), ("residual", 200), ("polynomial", 700)]
)
def test_thousands_of_nodes_in_a_row(
    name: str, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "MAX_LEVELS", 8)
    count, nodes = computations(name, depth, monkeypatch)
    assert count < 100 * nodes


def test_shared_part_beyond_horizon_is_consistent() -> None:
    """A shared part is beyond the horizon for all of its readers or for none."""
    graph = Graph()
    value = "x"
    for _ in range(40):
        value = graph.op("Add", graph.op("Mul", value, value), value)
    model = ir.from_proto(graph.model(value))
    positions = {node.outputs[0]: index for index, node in enumerate(model.graph)}

    def above(of: ir.Value, _: int) -> list[tuple[ir.Value, int]]:
        node = of.producer()
        return [(v, 1) for v in node.inputs if v is not None] if node is not None else []

    (output,) = model.graph.outputs
    found = reader.within_horizon(output, positions, above)
    assert output in found
    assert 4 < len(found) < 20
    # Nearest first, with no gap: all that reads one of them is among them.
    assert all(
        user.outputs[0] in found
        for value in found
        for user, _ in value.uses()
        if value is not output
    )


def test_progress_counts_the_nodes_read() -> None:
    graph = normalize(model_of(CHAINS["square"], 3))
    nodes = len(list(graph.graph))
    seen: list[tuple[int, int, str]] = []
    recognize(graph, lambda *counts: seen.append(counts))
    assert seen == [(done, nodes, "nodes read") for done in range(nodes)]
