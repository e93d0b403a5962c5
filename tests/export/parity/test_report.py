import io

import numpy as np
from rich.console import Console

from aftexport.bundle.golden import OPERATOR_OUTPUT, Case
from aftexport.heads import HEADS
from aftexport.parity import Comparison, compare
from aftexport.parity.report import meanings_of, parity_table, subject_of

IDS = {"input_ids": np.zeros((1, 3), np.int64)}


def compared(*names: str, subject: str = "model") -> list[Comparison]:
    outputs = {name: np.ones((1, 2)) for name in names}
    return compare(Case("a case", subject, IDS, outputs), outputs, "fp32")


def printed(results: list[Comparison]) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(parity_table(results, "float64"))
    return console.export_text()


def test_only_several_outputs_are_named() -> None:
    operator = compared(OPERATOR_OUTPUT, subject="AftSimple")
    single, several = compared("logits"), compared("topic", "mood")
    assert "output" not in printed([*single, *operator]).partition("The error is")[0]
    table = printed([*several, *operator])
    lines = [line.split() for line in table.splitlines()]
    assert ["a", "case", "topic"] in [line[:3] for line in lines]
    assert ["a", "case", "mood"] in [line[:3] for line in lines]
    assert ["AftSimple,", "a", "case", "1"] in [line[:4] for line in lines]
    assert [subject_of(result) for result in (*single, *several, *operator)] == [
        "model", "model, output topic", "model, output mood", "AftSimple"
    ]  # fmt: skip


def test_output_may_be_named_output() -> None:
    """The only output of an operator has this name too, and stays unnamed."""
    results = [*compared("output", "mood"), *compared(OPERATOR_OUTPUT, subject="AftSimple")]
    lines = [line.split() for line in printed(results).splitlines()]
    assert ["a", "case", "output"] in [line[:3] for line in lines]
    assert ["AftSimple,", "a", "case", "1"] in [line[:4] for line in lines]
    assert [subject_of(result) for result in results] == [
        "model, output output", "model, output mood", "AftSimple"
    ]  # fmt: skip


def test_meanings_have_names_of_several_heads() -> None:
    topic = HEADS["single_label_classification"].of_width(2, None)
    age = HEADS["regression"].of_width(1, None)
    assert meanings_of({"logits": topic}) == topic.meaning
    assert meanings_of({"topic": topic, "age": age}) == (
        f"topic: {topic.meaning}; age: {age.meaning}"
    )
