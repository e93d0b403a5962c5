import pytest

from aftserve.api.open_inference.descriptions import model_config
from aftserve.api.open_inference.schemas import ModelMetadata


@pytest.mark.parametrize(("is_on_gpu", "kind"), [(True, "KIND_GPU"), (False, "KIND_CPU")])
def test_kind_names_device_of_engine(is_on_gpu: bool, kind: str) -> None:
    """ONNX Runtime runs on either device."""
    metadata = ModelMetadata(
        name="model", versions=["1"], platform="onnxruntime_onnx", inputs=[], outputs=[]
    )
    (group,) = model_config(metadata, "onnxruntime", {}, is_on_gpu=is_on_gpu).instance_group
    assert group.kind == kind
