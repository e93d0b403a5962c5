import json
from typing import Any

import pytest

from aftexport.errors import UsageError
from aftexport.nn import LAYERS, ClassifierConfig, DocumentClassifier, MultiHeadConfig

NEEDED = {"mechanism": "aft_simple", "vocab_size": 100, "num_labels": 3}


@pytest.mark.parametrize("mechanism", LAYERS)
def test_a_configuration_survives_json(mechanism: str) -> None:
    config = ClassifierConfig(mechanism=mechanism, vocab_size=10, num_labels=2, max_length=8)
    assert ClassifierConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    "options",
    [
        {"pooling": "logsumexp"},
        {"pooling": "logsumexp", "pooling_temperature": 0.5},
        {"pooling": "top_k", "pooling_k": 4},
    ],
    ids=str,
)
def test_poolings_survive_json(options: dict[str, Any]) -> None:
    config = ClassifierConfig.from_dict(NEEDED | options)
    assert ClassifierConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    head = config.head_config
    several = MultiHeadConfig(mechanism="aft_simple", vocab_size=10, heads={"topic": head})
    assert MultiHeadConfig.from_dict(json.loads(json.dumps(several.to_dict()))) == several
    state = DocumentClassifier(config).state_dict()
    assert ("pooling.log_temperature" in state) is (options == {"pooling": "logsumexp"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"mechanism": "aft_fulll"},
            r"mechanism must be one of aft_full, aft_local.*got 'aft_fulll'",
        ),
        ({"mechanism": None}, r"mechanism must be .*got None"),
        ({"pooling": "sum"}, r"pooling must be one of mean, attention, max, .*none, got 'sum'"),
        ({"pooling": "none"}, r"pooling of single_label.* must be one of mean,.*got 'none'"),
        ({"pooling_temperature": 0.5}, r"pooling_temperature must be null for .* mean, got 0\.5"),
        ({"pooling": "logsumexp", "pooling_temperature": 0.0}, r"pooling_temperature .*got 0\.0"),
        ({"pooling": "logsumexp", "pooling_temperature": True}, r"a positive number.*got True"),
        ({"pooling": "top_k"}, r"pooling_k must be a positive whole number, got None"),
        ({"pooling": "max", "pooling_k": 4}, r"pooling_k must be null for the pooling max, got 4"),
        ({"problem_type": "feature_extraction"}, r"num_labels must be null for .*got 3.*Set dim"),
        ({"problem_type": "ranking"}, r"problem_type must be one of .*feature_extraction"),
        ({"gate": "relu"}, r"gate must be one of sigmoid, tanh, none, got 'relu'"),
        ({"normalization": "none"}, r"normalization must be one of softmax, scaling, got 'none'"),
        ({"feature_map": "gelu"}, r"feature_map must be one of elu, relu, got 'gelu'"),
        ({"vocab_size": 0}, r"vocab_size must be a positive whole number, got 0"),
        ({"num_labels": -1}, r"num_labels must be a positive.*got -1"),
        ({"dim": 6.5}, r"dim must be a positive.*got 6\.5"),
        ({"depth": True}, r"depth must be a positive.*got True"),
        ({"ffn_dim": "256"}, r"ffn_dim must be a positive.*got '256'"),
        ({"window": 0}, r"window must be a positive.*got 0"),
        ({"bias_rank": -1}, r"bias_rank must be .*got -1"),
        ({"bias_rank": "64"}, r"bias_rank must be .*got '64'"),
        ({"num_heads": 0}, r"num_heads must be a positive.*got 0"),
        ({"num_heads": 5}, r"num_heads must divide dim 64, got 5"),
        ({"max_length": 0}, r"max_length must be a positive whole number or null, got 0"),
        ({"max_length": 9.5}, r"max_length must be .*got 9\.5"),
        ({"max_length": True}, r"max_length must be .*got True"),
        ({"causal": "no"}, r"causal must be true or false, got 'no'"),
        ({"mechanism": "aft_full"}, r"aft_full .*needs max_length.*Set max_length"),
        ({"heads": 4}, r"known configuration entries, got heads.*Choose from .*num_heads"),
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


def test_vectors_need_no_number_of_labels() -> None:
    given = {"mechanism": "aft_simple", "vocab_size": 100, "problem_type": "feature_extraction"}
    assert not ClassifierConfig.from_dict(given).head_config.is_per_token
    assert ClassifierConfig.from_dict(given | {"pooling": "none"}).head_config.is_per_token


def test_features_replace_vocabulary() -> None:
    given = {"mechanism": "aft_simple", "num_features": 4, "num_labels": 3}
    config = ClassifierConfig.from_dict(given)
    assert (config.num_features, config.vocab_size) == (4, None)
    assert ClassifierConfig.from_dict(config.to_dict()) == config
    assert "vocab_size" not in config.to_dict()
    assert "num_features" not in ClassifierConfig.from_dict(NEEDED).to_dict()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_features": 4}, "exactly one of vocab_size and num_features, got 100 and 4"),
        ({"vocab_size": None, "num_features": 0}, "num_features must be a positive .*got 0"),
        ({"vocab_size": None}, "exactly one of vocab_size and num_features, got None and None"),
    ],
)
def test_ambiguous_tokens_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ClassifierConfig(**NEEDED | changes)
