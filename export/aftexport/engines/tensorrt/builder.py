"""The builder of engines from ``model.onnx``, with TensorRT or TensorRT-RTX.

Both have the same Python classes. Networks are strongly typed: their types are those of the
graph. TensorRT 11 only has strongly typed networks.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError

from aftexport.engines.aft_full_product import use_products
from aftexport.engines.plain_attention import write_attention
from aftexport.engines.tensorrt.runtimes import (
    EXTRAS,
    LOGIT_TYPES,
    TensorRt,
    element,
    plugins_loaded,
)
from aftexport.engines.tensorrt.settings import BuildSettings
from aftexport.errors import EngineError, UsageError
from aftexport.operators.domain import DOMAIN
from aftexport.system.contract import FEATURES, IDS, LENGTHS
from aftexport.system.files import replacing_file
from aftexport.system.installation import install_command

Progress = Callable[[str, int, int], None]
"""A callback with a phase, its completed steps, and its total steps."""

_INPUT_TYPES = {IDS: "int64", FEATURES: "float32", LENGTHS: "int64"}
_PRODUCTS = ("MatMul", "Gemm", "Einsum")
_SMALLER = "Give a smaller --max-length, --max-batch or --workspace."


@dataclass(frozen=True)
class BuiltEngine:
    """A serialized engine."""

    engine: bytes
    types: Mapping[str, str]
    operators: Mapping[str, str]  # `plugin` or `portable` for each custom operator


def build(
    trt: TensorRt,
    model: Path,
    settings: BuildSettings,
    *,
    precision: str,
    plugins: Path | None = None,  # becomes part of the engine; None for the portable bodies
    timing_cache: Path | None = None,  # is read if it exists, and written back
    progress: Progress = lambda phase, done, total: None,  # an exception from it ends the build
) -> BuiltEngine:
    """Build an engine; raise UsageError or EngineError if settings, model or types do not fit."""
    module = trt.module
    builder = module.Builder(trt.logger)
    with plugins_loaded(trt, plugins):
        network = builder.create_network(_strongly_typed(module))
        operators = _parse(trt, network, model, settings, has_plugins=plugins is not None)
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
    return BuiltEngine(bytes(engine), types, operators)


def network_types(network: Any) -> dict[str, str]:
    """Return the element types of a network's inputs and outputs, by name."""
    tensors = [network.get_input(i) for i in range(network.num_inputs)]
    tensors += [network.get_output(i) for i in range(network.num_outputs)]
    return {tensor.name: element(tensor.dtype) for tensor in tensors}


def check_types(title: str, types: Mapping[str, str], precision: str) -> None:
    """Check the types of an engine or a network against the precision.

    A builder that ignores a precision does not report it.
    """
    for name, actual in types.items():
        expected = _INPUT_TYPES.get(name, LOGIT_TYPES[precision])
        if actual != expected:
            raise EngineError(
                f"Expected {name} of type {expected} for {precision}, got {actual} from {title}.",
                "Export the model again with the --precision of the engine.",
            )


def _strongly_typed(module: Any) -> int:
    flag = getattr(module.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return 0 if flag is None else 1 << int(flag)


def _parse(
    trt: TensorRt, network: Any, model: Path, settings: BuildSettings, *, has_plugins: bool
) -> dict[str, str]:
    """Parse the model; return ``plugin`` or ``portable`` for each custom operator."""
    parser = trt.module.OnnxParser(network, trt.logger)
    trt.logger.errors.clear()
    try:
        graph = onnx.load(model, load_external_data=False)
    except DecodeError as error:
        raise EngineError(
            f"{trt.title} cannot parse {model.name}: it is not an ONNX file ({error}).",
            "Export the model again.",
        ) from error
    nodes = [(node.name, node.op_type) for node in graph.graph.node if node.domain == DOMAIN]
    if has_plugins:
        use_products(graph, "tensorrt", max_tokens=settings.max_length)
    prepared = _prepare(trt)(graph, has_plugins=has_plugins)
    is_parsed = parser.parse(prepared.SerializeToString(), str(model))
    if not is_parsed:
        errors = [parser.get_error(i) for i in range(parser.num_errors)]
        reason = "; ".join(f"{e.node_operator()} {e.node_name()}: {e.desc()}" for e in errors[:3])
        raise EngineError(
            f"{trt.title} cannot parse {model.name}: {reason or trt.reason()}.",
            "Export the model again with a lower --opset."
            if "opset" in reason.lower()
            else "Write the operator in this message in others, or add --to onnx.",
        )
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    plugins = {layer.name for layer in layers if layer.type == trt.module.LayerType.PLUGIN_V3}
    ways: dict[str, set[str]] = defaultdict(set)
    for name, op_type in nodes:
        ways[op_type].add("plugin" if name in plugins else "portable")
    return {
        op_type: "plugin" if paths == {"plugin"} else "portable"
        for op_type, paths in sorted(ways.items())
    }


def _prepare(trt: TensorRt) -> Callable[..., onnx.ModelProto]:
    """Return ``prepare_graph``, whose library only builds need."""
    try:
        from aftexport.engines.tensorrt.graph_rewrites import prepare_graph
    except ModuleNotFoundError as error:
        raise EngineError(
            f"{error.name} is not installed.", f"Run: {install_command(EXTRAS[trt.name])}"
        ) from error
    return prepare_graph


def _check_turing(model: Path, operators: Mapping[str, str]) -> None:
    graph = onnx.load(model, load_external_data=False)
    write_attention(graph)  # its plain nodes multiply in the precision of the graph
    for function in graph.functions:
        if function.name in operators and _has_products(function.node):
            raise UsageError(
                f"The fallback of {function.name} multiplies in float32, which "
                "TensorRT-RTX cannot do on compute capability 75.",
                "Leave 75 out of --compute-capability.",
            )


def _has_products(nodes: Any) -> bool:
    return any(
        node.op_type in _PRODUCTS or any(_has_products(a.g.node) for a in node.attribute)
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
            # Each input begins with the batch, and then has the tokens. Fixed axes keep their size.
            axes = list(tensor.shape)
            shapes = [
                [corner[i] if size < 0 else size for i, size in enumerate(axes)]
                for corner in corners
            ]
            profile.set_shape(tensor.name, *shapes)
        if config.add_optimization_profile(profile) < 0:
            raise EngineError(
                f"{trt.title} refuses the profile {corners}: {trt.reason()}.",
                "Give another --min-length, --opt-length or --max-length.",
            )


@contextmanager
def _timings(trt: TensorRt, config: Any, path: Path | None) -> Iterator[None]:
    """Use kernel timings of earlier builds; leave a file with any other content unchanged."""
    if path is None:
        yield
        return
    known = path.read_bytes() if path.exists() else b""
    failure = f"cannot read --timing-cache {path}"
    remedy = "Give a file that an earlier build wrote, or a path that does not exist."
    cache = trt.attempt(lambda: config.create_timing_cache(known), failure, remedy)
    if trt.logger.errors:  # TensorRT then makes an empty cache, which would overwrite the file
        raise EngineError(f"{trt.title} {failure}: {trt.reason()}.", remedy)
    trt.attempt(
        lambda: config.set_timing_cache(cache, ignore_mismatch=False),
        f"refuses --timing-cache {path} of another GPU or version",
        "Give one file for each GPU and version.",
    )
    yield
    with replacing_file(path) as aside:
        aside.write_bytes(bytes(config.get_timing_cache().serialize()))


@contextmanager
def _monitor(trt: TensorRt, config: Any, progress: Progress) -> Iterator[Callable[[], None]]:
    """Report the build to ``progress``; yield a function that raises the exception of ``progress``.

    An exception must not pass through the builder. The build is cancelled instead, and the
    exception is raised after the builder has returned.
    """
    base = trt.module.IProgressMonitor
    raised: list[BaseException] = []

    class Monitor(base):  # type: ignore[misc, valid-type]  # the base is known only after the import
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
