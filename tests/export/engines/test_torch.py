import numpy as np
import pytest
import tiny_models
import torch

from aftexport.engines.torch import TorchEngine
from aftexport.errors import EngineError

IDS = {"input_ids": np.arange(6).reshape(2, 3)}


def test_module_runs_in_evaluation_mode() -> None:
    engine = TorchEngine(tiny_models.Dropout().train(), ("input_ids",))
    first, second = (engine.run(IDS)["logits"] for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_the_logits_are_the_modules() -> None:
    module = tiny_models.Bag()
    with torch.no_grad():
        expected = module(torch.from_numpy(IDS["input_ids"])).numpy()
    np.testing.assert_array_equal(TorchEngine(module, ("input_ids",)).run(IDS)["logits"], expected)


def test_logits_become_float32_for_numpy() -> None:
    """NumPy lacks the logits' own type."""
    engine = TorchEngine(tiny_models.Bag().bfloat16(), ("input_ids",))
    assert engine.run(IDS)["logits"].dtype == np.float32


@pytest.mark.parametrize(
    ("module", "ids"),
    [
        (tiny_models.Bag(), [[300]]),
        (tiny_models.Positions(), [[1] * 33]),
        (tiny_models.Pair(), [[1]]),
    ],
    ids=["id outside", "too long", "two outputs"],
)
def test_failing_module_gives_engine_error(module: torch.nn.Module, ids: list[list[int]]) -> None:
    with pytest.raises(EngineError):
        TorchEngine(module, ("input_ids",)).run({"input_ids": np.array(ids)})
