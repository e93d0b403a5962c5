import torch

from .layers import DIM, HEADS, documents, make_layer


def test_the_layer_is_the_authors_attention() -> None:
    """Step by step as in their code, with the value their query and biases on both logits."""
    layer = make_layer("fastformer")
    x, lengths = documents(17, 9)
    batch, tokens, width = 2, 17, DIM // HEADS
    valid = torch.arange(tokens) < lengths[:, None]
    mask = ((1 - valid.double()) * -10000)[:, None]

    def split(t: torch.Tensor) -> torch.Tensor:
        return t.view(batch, tokens, HEADS, width).permute(0, 2, 1, 3)

    query, key = layer.query(x), layer.key(x)
    query_for_score = (query @ layer.alpha_weight + 0.7).transpose(1, 2) / width**0.5
    query_weight = (query_for_score + mask).softmax(-1).unsqueeze(2)
    pooled_query = (query_weight @ split(query)).transpose(1, 2).reshape(batch, 1, DIM)
    query_key = key * pooled_query.repeat(1, tokens, 1)
    key_for_score = (query_key @ layer.beta_weight - 0.3).transpose(1, 2) / width**0.5
    key_weight = (key_for_score + mask).softmax(-1).unsqueeze(2)
    pooled_key = key_weight @ split(query_key)
    weighted_value = (pooled_key * split(query)).transpose(1, 2).reshape(batch, tokens, DIM)
    expected = layer.output(weighted_value) + query
    assert (layer(x, lengths) - expected)[valid].abs().max() < 1e-9
