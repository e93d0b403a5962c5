"""The checks of a request by the Open Inference Protocol before its tensors are read."""

from pathlib import Path
from typing import Any

import input_models
import pytest

from aftexport.bundle.bundle import Bundle
from aftexport.errors import InputError
from aftserve.api.open_inference.messages import Message, parse


def tensor(name: str, datatype: str, *values: Any, shape: tuple[int, ...]) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": [*shape], "data": [*values]}


TENSORS = {
    "text": tensor("text", "BYTES", "ab", shape=(1,)),
    "static": tensor("static", "FP32", 0, 0, 0, 0, shape=(1, input_models.WIDTH)),
    "region": tensor("region", "INT64", 1, shape=(1,)),
    "flags": tensor("flags", "INT64", 0, 1, shape=(1, 2)),
    "token_type_ids": tensor("token_type_ids", "INT64", 0, 1, shape=(1, 2)),
}


def read(inputs: list[dict[str, Any]], bundle: Path) -> Message:
    return parse(
        {"inputs": inputs},
        memoryview(b""),
        max_documents=8,
        manifest=Bundle.open(bundle).manifest,
        outputs=[],
    )


def test_extra_tensors_belong_to_documents(extra_bundle: Path) -> None:
    message = read([*TENSORS.values()], extra_bundle)
    assert message.documents == ["ab"]
    assert message.given[0]["token_type_ids"].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("inputs", "got"),
    [
        ([*TENSORS.values(), TENSORS["static"]], ", static, .*, static"),
        ([*TENSORS.values(), TENSORS["text"]], "text, .*, text"),
        ([TENSORS["text"], TENSORS["region"] | {"name": "regoin"}], "text, regoin"),
    ],
    ids=["extra input twice", "text twice", "wrong name"],
)
def test_unexpected_names_are_refused(
    inputs: list[dict[str, Any]], got: str, extra_bundle: Path
) -> None:
    known = "static, region, flags, token_type_ids"
    with pytest.raises(InputError, match=f"each once, and beside them {known}, got .*{got}"):
        read(inputs, extra_bundle)
