"""Triton's own schema of a model configuration."""

import importlib.util
from importlib.metadata import distribution
from pathlib import Path
from types import ModuleType
from typing import Any

from google.protobuf import text_format


def _model_config() -> ModuleType:
    # The package that it is part of wants gRPC, which it does not need itself.
    file = distribution("tritonclient").locate_file("tritonclient/grpc/model_config_pb2.py")
    spec = importlib.util.spec_from_file_location("model_config_pb2", str(file))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MODEL_CONFIG = _model_config()


def parsed(folder: Path) -> Any:
    """The configuration of a model's folder; a field that the schema lacks is an error."""
    text = (folder / "config.pbtxt").read_text("utf-8")
    return text_format.Parse(text, MODEL_CONFIG.ModelConfig())
