import pytest
import tiny_models
import torch

from aftexport.capture.capture import capture, copied
from aftexport.capture.input_spec import input_spec
from aftexport.errors import TraceError
from aftexport.nn import DocumentClassifier


def test_spec_describes_inputs(classifier: DocumentClassifier) -> None:
    spec = input_spec(capture(classifier))
    assert spec.names == ("input_ids", "lengths")
    assert (spec.vocab_size, spec.embedding, spec.max_tokens) == (300, "embedding.weight", None)


def test_capture_leaves_module_unchanged() -> None:
    module = tiny_models.Dropout().train()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    capture(module, dtype=torch.float16)
    assert module.training
    for name, tensor in module.state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, before[name])


def test_module_keeping_results_is_captured() -> None:
    module = tiny_models.Bag()
    module.kept = module.head.weight * 2
    module.register_buffer("scale", module.head.weight.norm())
    assert input_spec(capture(module)).names == ("input_ids",)
    assert module.kept.requires_grad
    copied(module).kept.zero_()
    assert module.kept.any()


def test_program_without_embedding_is_refused() -> None:
    with pytest.raises(TraceError, match="embedding"):
        input_spec(capture(tiny_models.NoEmbedding()))


def test_embedding_under_autocast_is_refused() -> None:
    with pytest.raises(TraceError, match="block of its forward: autocast"):
        input_spec(capture(tiny_models.Autocast()))
