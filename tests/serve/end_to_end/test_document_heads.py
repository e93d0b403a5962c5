"""A model with several heads for documents is served as PyTorch computes each of them."""

from collections.abc import Iterator

import pytest
import several_heads
import tiny_models
import torch
from clients import http
from servers import serving

import aftexport
from aftexport.pipeline.export import export

IDS = [[5, 6, 299, 17, 3], [8], [*range(200)]]
NAMES = [*several_heads.TASKS]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("several")
    model = folder / "model.pt"
    tokenizer = tiny_models.byte_tokenizer().to_str()
    aftexport.save(model, model=several_heads.classifier(), tokenizer=tokenizer)
    bundle = export(model)
    options = ["--reference", str(model)]
    with serving(bundle.path, folder / "log", *options) as (served, _):
        yield served


def expected(ids: list[int]) -> dict[str, torch.Tensor]:
    """Compute the logits of each head by PyTorch in float64."""
    model = several_heads.classifier().double()
    with torch.no_grad():
        outputs = model(torch.tensor([ids]), torch.tensor([len(ids)]))
    return {name: outputs[name][0] for name in NAMES}


def test_answer_has_each_head(address: str) -> None:
    response = http.post(f"{address}/infer", json={"input_ids": IDS})
    for ids, result in zip(IDS, response.json()["results"], strict=True):
        heads, logits = result["heads"], expected(ids)
        assert list(heads) == NAMES
        topics, flags = (list(heads[name]["scores"].values()) for name in ("topic", "flags"))
        assert topics == pytest.approx(logits["topic"].softmax(0).tolist(), abs=1e-5)
        assert heads["topic"]["label"] == f"class_{int(logits['topic'].argmax())}"
        assert flags == pytest.approx(logits["flags"].sigmoid().tolist(), abs=1e-5)
        assert list(heads["age"]["values"].values()) == pytest.approx(
            logits["age"].tolist(), abs=1e-5
        )


def test_parity_covers_each_head(address: str) -> None:
    golden = http.get(f"{address}/parity").json()["golden"]
    ours = [case for case in golden if case["subject"] == "model"]
    assert {case["output"] for case in ours} == set(NAMES)
    response = http.post(f"{address}/parity", json={"input_ids": IDS[0]}, timeout=120)
    assert response.status_code == 200, response.text
    check = response.json()
    assert check["within"]
    assert [output["head"] for output in check["outputs"]] == [
        name for name, width in several_heads.WIDTHS.items() for _ in range(width)
    ]
    wanted = [number for name in NAMES for number in expected(IDS[0])[name].tolist()]
    assert [output["reference"] for output in check["outputs"]] == pytest.approx(wanted, abs=1e-12)


def test_evidence_is_of_first_head(address: str) -> None:
    ids = IDS[2]
    result = http.post(f"{address}/infer?evidence=2", json={"input_ids": [ids]}).json()
    (answer,) = result["results"]
    logits = expected(ids)["topic"]
    assert answer["evidence"]["logit"] == pytest.approx(float(logits.max()), abs=1e-4)


def test_info_lists_heads_in_order(address: str) -> None:
    info = http.get(f"{address}/info").json()
    assert {name: head["task"] for name, head in info["heads"].items()} == several_heads.TASKS
    assert list(info["heads"]) == NAMES
