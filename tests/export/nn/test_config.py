import json
from typing import Any

import pytest

from aftexport.errors import UsageError
from aftexport.nn import LAYERS, ClassifierConfig

NEEDED = {"mechanism": "aft_simple", "vocab_size": 100, "num_labels": 3}


@pytest.mark.parametrize("mechanism", LAYERS)
def test_a_configuration_survives_json(mechanism: str) -> None:
    config = ClassifierConfig(mechanism=mechanism, vocab_size=10, num_labels=2, max_length=8)
    assert ClassifierConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mechanism": "aft_fulll"}, r"mechanism is 'aft_fulll'.*aft_full, aft_local"),
        ({"mechanism": None}, r"mechanism is None"),
        ({"pooling": "max"}, r"pooling is 'max'.*mean, attention"),
        ({"gate": "relu"}, r"gate is 'relu'.*sigmoid, tanh, none"),
        ({"normalization": "none"}, r"normalization is 'none'.*softmax, scaling"),
        ({"feature_map": "gelu"}, r"feature_map is 'gelu'.*elu, relu"),
        ({"vocab_size": 0}, r"vocab_size is 0.*positive whole number"),
        ({"num_labels": -1}, r"num_labels is -1.*positive"),
        ({"dim": 6.5}, r"dim is 6\.5.*positive"),
        ({"depth": True}, r"depth is True.*positive"),
        ({"ffn_dim": "256"}, r"ffn_dim is '256'.*positive"),
        ({"window": 0}, r"window is 0.*positive"),
        ({"bias_rank": -1}, r"bias_rank is -1"),
        ({"bias_rank": "64"}, r"bias_rank is '64'"),
        ({"num_heads": 0}, r"num_heads is 0.*positive"),
        ({"num_heads": 5}, r"num_heads 5 does not divide dim 64"),
        ({"max_length": 0}, r"max_length is 0.*positive whole number, or null"),
        ({"max_length": 9.5}, r"max_length is 9\.5"),
        ({"max_length": True}, r"max_length is True"),
        ({"causal": "no"}, r"causal is 'no'"),
        ({"mechanism": "aft_full"}, r"aft_full .*needs max_length.*Set max_length"),
        ({"heads": 4}, r"unknown entries: heads.*Known are .*num_heads"),
    ],
    ids=str,
)
def test_impossible_configuration_error_has_remedy(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as refusal:
        ClassifierConfig.from_dict(NEEDED | changes)
    assert refusal.value.problem
    assert refusal.value.remedy


def test_missing_field_is_named() -> None:
    with pytest.raises(UsageError, match=r"lacks num_labels, vocab_size"):
        ClassifierConfig.from_dict({"mechanism": "aft_simple"})
