"""The outputs of a model of many labels, as answers to questions."""

from aftexport.heads import BinaryClassification, SingleLabelClassification
from aftserve.api.adapters.decisions import Labelled, Outputs, Statement

MANY = tuple(f"label {i}" for i in range(5000))
HEADS = {
    "many": SingleLabelClassification(labels=MANY),
    "paid": BinaryClassification(labels=("no", "yes")),
    "sent": BinaryClassification(labels=("no", "yes")),
}


def test_questions_find_outputs() -> None:
    outputs = Outputs(HEADS)
    assert outputs.of_labels(None, MANY[::-1]) == [Labelled("many", MANY[::-1])]
    assert outputs.of_labels("paid", ["yes", "no"]) == [Labelled("paid", ("yes", "no"))]
    assert [one.head for one in outputs.of_labels("other", ["yes", "no"])] == ["paid", "sent"]
    for labels in (["yes", "yes"], ["yes"], ["yes", "no", "no"], ["yes", "no", {}], [True, "no"]):
        assert outputs.of_labels(None, labels) == []
    assert outputs.of_statement("paid") == [Statement("paid", "yes")]
    assert outputs.of_statement("sent:no") == [Statement("sent", "no")]
    assert outputs.of_statement("yes") == [Statement("paid", "yes"), Statement("sent", "yes")]
    assert outputs.of_statement("label 7") == [Statement("many", "label 7")]
    assert outputs.of_statement(None) == outputs.of_statement("many") == []
