"""Bundles with TensorRT engines, and places to build them in."""

from pathlib import Path

import onnx
import tiny_models
import torch

from aftexport.capture.capture import capture
from aftexport.engines.tensorrt.builder import BuiltEngine
from aftexport.engines.tensorrt.engine_file import EngineRecord, EngineRequirements
from aftexport.engines.tensorrt.settings import build_settings
from aftexport.lowering.finish import finish
from aftexport.lowering.to_onnx import lower
from aftexport.nn import ClassifierConfig, DocumentClassifier
from aftexport.options import EngineOptions

SETTINGS = build_settings("trt-rtx", EngineOptions(), precision="fp16", max_tokens=300)
WANTED = EngineRequirements("1.7", None, SETTINGS, "fp16", "model", None)
TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def graph(folder: Path, precision: str = "fp16", **config: object) -> Path:
    """The tiny classifier, or one of another mechanism, as it is exported for an engine."""
    torch.manual_seed(0)
    model = DocumentClassifier(ClassifierConfig(**tiny_models.CONFIG | config))
    program = capture(model, dtype=TYPES[precision], max_tokens=model.max_length)
    path = folder / "model.onnx"
    onnx.save(finish(lower(program), precision=precision, fuse=False), path)
    return path


def record(engine: bytes = b"engine", wanted: EngineRequirements = WANTED) -> EngineRecord:
    return EngineRecord.of(
        BuiltEngine(engine, {"logits": "float16"}, {"AftSimple": "portable"}), wanted
    )
