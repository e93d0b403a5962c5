"""Builds engines from ``model.onnx``, by TensorRT or TensorRT-RTX, whose Python classes are alike.

Networks are strongly typed: the types are those of the graph. TensorRT 11 knows no others.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from aftexport.engines.tensorrt.runtimes import LOGIT_TYPES, TensorRt, element, plugins_loaded
from aftexport.engines.tensorrt.settings import BuildSettings
from aftexport.errors import EngineError, UsageError
from aftexport.operators.domain import DOMAIN
from aftexport.system.files import replacing_file

Progress = Callable[[str, int, int], None]
"""Called with a phase, its steps that are done, and all of them."""

_PRODUCTS = ("MatMul", "Gemm", "Einsum")
_SMALLER = "Give a smaller --max-length, --max-batch or --workspace."


@dataclass(frozen=True)
class Built:
    """A serialized engine.

    Attributes:
        engine: what the runtime loads.
        types: element type of each input and output, as the network has them.
        operators: custom operator to ``plugin`` or ``portable``.
    """

    engine: bytes
    types: Mapping[str, str]
    operators: Mapping[str, str]


def build(
    trt: TensorRt,
    model: Path,
    settings: BuildSettings,
    *,
    precision: str,
    plugins: Path | None = None,
    timing_cache: Path | None = None,
    progress: Progress = lambda phase, done, total: None,
) -> Built:
    """Builds an engine.

    Args:
        trt: what builds it, and later runs it.
        model: ``model.onnx``.
        settings: what it is built for.
        precision: that the graph was exported in.
        plugins: the plugin library, which becomes part of the engine; None for the
            portable bodies.
        timing_cache: file of kernel timings, read where it exists and written back.
        progress: told of the phases; an exception from it ends the build.

    Raises:
        UsageError: where the settings and the model cannot be had together.
        EngineError: where the parser or the builder refuses the model, or the network
            has other types than ``precision`` says.
    """
    module = trt.module
    builder = module.Builder(trt.logger)
    with plugins_loaded(trt, plugins):
        network = builder.create_network(_strongly_typed(module))
        operators = _parse(trt, network, model)
        types = network_types(network)
        check_types(trt.title, types, precision)
        if 75 in settings.compute_capabilities:
            _check_turing(model, operators)
        config = builder.create_builder_config()
        if precision == "fp32":
            # TF32, TensorRT's own choice, would round operands to 11 bits.
            config.clear_flag(module.BuilderFlag.TF32)
        _add_profiles(trt, builder, config, network, settings)
        if plugins is not None and "plugin" in operators.values():
            config.plugins_to_serialize = [str(plugins)]
        if settings.workspace_mib is not None:
            pool = module.MemoryPoolType.WORKSPACE
            config.set_memory_pool_limit(pool, settings.workspace_mib << 20)
        if settings.compute_capabilities:
            config.num_compute_capabilities = len(settings.compute_capabilities)
        for index, capability in enumerate(settings.compute_capabilities):
            gpu = getattr(module.ComputeCapability, f"SM{capability}")
            config.set_compute_capability(gpu, index)
        with _timings(trt, config, timing_cache), _monitor(trt, config, progress) as check:
            engine = trt.attempt(
                lambda: builder.build_serialized_network(network, config),
                "built no engine",
                _SMALLER,
            )
            check()
    return Built(bytes(engine), types, operators)


def network_types(network: Any) -> dict[str, str]:
    """Element types of a network's inputs and outputs, by name."""
    tensors = [network.get_input(i) for i in range(network.num_inputs)]
    tensors += [network.get_output(i) for i in range(network.num_outputs)]
    return {tensor.name: element(tensor.dtype) for tensor in tensors}


def check_types(title: str, types: Mapping[str, str], precision: str) -> None:
    """Compares the types of an engine or a network with those that were asked for.

    Raises:
        EngineError: where one differs; a builder that ignores a precision says nothing.
    """
    for name, found in types.items():
        asked = LOGIT_TYPES[precision] if name == "logits" else "int64"
        if found != asked:
            raise EngineError(
                f"{title} made {name} {found}; {precision} asks for {asked}.",
                "Export the model again with the --precision that the engine is to have.",
            )


def _strongly_typed(module: Any) -> int:
    flag = getattr(module.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return 0 if flag is None else 1 << int(flag)


def _parse(trt: TensorRt, network: Any, model: Path) -> dict[str, str]:
    """Parses the model; tells which of its custom operators became plugins."""
    parser = trt.module.OnnxParser(network, trt.logger)
    trt.logger.errors.clear()
    if not parser.parse_from_file(str(model)):
        errors = [parser.get_error(i) for i in range(parser.num_errors)]
        told = "; ".join(f"{e.node_operator()} {e.node_name()}: {e.desc()}" for e in errors[:3])
        raise EngineError(
            f"{trt.title} cannot parse {model.name}: {told or trt.reason()}.",
            "Export the model again, with a lower --opset if the message names one.",
        )
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    plugins = {layer.name for layer in layers if layer.type == trt.module.LayerType.PLUGIN_V3}
    graph = onnx.load(model, load_external_data=False).graph
    ways: dict[str, set[str]] = defaultdict(set)
    for node in graph.node:
        if node.domain == DOMAIN:
            ways[node.op_type].add("plugin" if node.name in plugins else "portable")
    return {
        op_type: "plugin" if found == {"plugin"} else "portable"
        for op_type, found in sorted(ways.items())
    }


def _check_turing(model: Path, operators: Mapping[str, str]) -> None:
    functions = onnx.load(model, load_external_data=False).functions
    for function in functions:
        if function.name in operators and _multiplies(function.node):
            raise UsageError(
                f"The portable body of {function.name} multiplies in float32, which "
                "TensorRT-RTX cannot do on compute capability 75.",
                "Leave 75 out of --compute-capability.",
            )


def _multiplies(nodes: Any) -> bool:
    return any(
        node.op_type in _PRODUCTS or any(_multiplies(a.g.node) for a in node.attribute)
        for node in nodes
    )


def _add_profiles(
    trt: TensorRt, builder: Any, config: Any, network: Any, settings: BuildSettings
) -> None:
    inputs = [network.get_input(i) for i in range(network.num_inputs)]
    for best in settings.opt_lengths:
        corners = [(1, settings.min_length), (1, best), (settings.max_batch, settings.max_length)]
        profile = builder.create_optimization_profile()
        for tensor in inputs:
            # Both inputs begin with the batch; an axis the graph fixes stays what it is.
            axes = list(tensor.shape)
            shapes = [
                [size if axis < 0 else axis for axis, size in zip(axes, corner, strict=False)]
                for corner in corners
            ]
            profile.set_shape(tensor.name, *shapes)
        if config.add_optimization_profile(profile) < 0:
            raise EngineError(
                f"{trt.title} refuses the profile {corners}: {trt.reason()}.",
                "Give other --min-length, --opt-length and --max-length.",
            )


@contextmanager
def _timings(trt: TensorRt, config: Any, path: Path | None) -> Iterator[None]:
    """Kernel timings of earlier builds; a file that holds anything else is left as it is."""
    if path is None:
        yield
        return
    known = path.read_bytes() if path.exists() else b""
    what = f"cannot read --timing-cache {path}"
    remedy = "Give a file that an earlier build wrote, or one that does not exist."
    cache = trt.attempt(lambda: config.create_timing_cache(known), what, remedy)
    if trt.logger.errors:  # it makes an empty one then, which would overwrite the file
        raise EngineError(f"{trt.title} {what}: {trt.reason()}.", remedy)
    trt.attempt(
        lambda: config.set_timing_cache(cache, ignore_mismatch=False),
        f"refuses --timing-cache {path}, of another GPU or version",
        "Give one file for each GPU and version.",
    )
    yield
    with replacing_file(path) as aside:
        aside.write_bytes(bytes(config.get_timing_cache().serialize()))


@contextmanager
def _monitor(trt: TensorRt, config: Any, progress: Progress) -> Iterator[Callable[[], None]]:
    """Tells ``progress`` of the build; yields what raises again what ``progress`` raised.

    An exception must not pass through the builder: the build is cancelled, and it is
    raised once the builder has returned.
    """
    base = trt.module.IProgressMonitor
    raised: list[BaseException] = []

    class Monitor(base):  # type: ignore[misc, valid-type]  # known only once it is imported
        def __init__(self) -> None:
            base.__init__(self)
            self.totals: dict[str, int] = {}

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            self.totals[name] = steps
            self._tell(name, 0)

        def step_complete(self, name: str, step: int) -> bool:
            self._tell(name, step + 1)
            return not raised

        def phase_finish(self, name: str) -> None:
            self._tell(name, self.totals[name])

        def _tell(self, name: str, done: int) -> None:
            try:
                progress(name, done, self.totals[name])
            except BaseException as error:
                raised.append(error)

    def check() -> None:
        if raised:
            raise raised[0]

    config.progress_monitor = Monitor()
    try:
        yield check
    except EngineError:
        check()
        raise
