"""Parse a model with TensorRT-RTX, build an engine of it and print the result as JSON.

    python build_engine.py MODEL [PLUGIN_LIBRARY]

A process of its own, because a fault in the parser ends the process.
"""

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import tensorrt_rtx as trt

BATCH = (1, 2, 4)
TOKENS = (1, 16, 32)


class Log(trt.ILogger):
    def __init__(self) -> None:
        super().__init__()
        self.errors: list[str] = []

    def log(self, severity: trt.ILogger.Severity, message: str) -> None:
        if severity <= trt.ILogger.ERROR:
            self.errors.append(message)


def load_plugins(library: Path, registry: trt.IPluginRegistry) -> None:
    ctypes.CDLL(str(library.with_name("libtensorrt_rtx.so")))  # see rtx_alias.cmake
    assert registry.load_library(str(library)) is not None, f"{library} cannot be loaded"


def description(tensors: list[trt.ITensor]) -> dict[str, Any]:
    return {t.name: [t.dtype.name, list(t.shape)] for t in tensors}


def profile(builder: trt.Builder, inputs: list[trt.ITensor]) -> trt.IOptimizationProfile:
    """Set a range for every open axis: the first is the batch, the second the tokens."""
    made = builder.create_optimization_profile()
    for tensor in inputs:
        least_best_most = [
            [open_ if axis < 0 else axis for axis, open_ in zip(tensor.shape, sizes, strict=False)]
            + list(tensor.shape)[2:]
            for sizes in zip(BATCH, TOKENS, strict=True)
        ]
        made.set_shape(tensor.name, *least_best_most)
    return made


def main(model: str, plugins: str | None = None) -> None:
    log = Log()
    builder = trt.Builder(log)
    if plugins is not None:
        load_plugins(Path(plugins), builder.get_plugin_registry())
    network = builder.create_network(0)
    parsed = trt.OnnxParser(network, log).parse_from_file(model)
    result: dict[str, Any] = {"parsed": parsed, "engine": False, "errors": log.errors}
    if parsed:
        inputs = [network.get_input(i) for i in range(network.num_inputs)]
        outputs = [network.get_output(i) for i in range(network.num_outputs)]
        layers = [network.get_layer(i) for i in range(network.num_layers)]
        result |= {"inputs": description(inputs), "outputs": description(outputs)}
        result["plugins"] = [x.name for x in layers if x.type == trt.LayerType.PLUGIN_V3]
        config = builder.create_builder_config()
        config.num_compute_capabilities = 1
        config.set_compute_capability(trt.ComputeCapability.SM86, 0)
        assert config.add_optimization_profile(profile(builder, inputs)) >= 0
        if plugins is not None:
            config.plugins_to_serialize = [plugins]
        engine = builder.build_serialized_network(network, config)
        result["engine"] = engine is not None and engine.nbytes > 0
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
