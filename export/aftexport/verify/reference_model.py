"""The PyTorch model of a bundle, which the bundle does not contain."""

from pathlib import Path

from aftexport.bundle.bundle import Bundle
from aftexport.capture.model_inputs import with_plain_inputs
from aftexport.capture.reference_module import ReferenceModule
from aftexport.checkpoint import Checkpoint, from_factory, load
from aftexport.engines.torch import TorchEngine
from aftexport.errors import UsageError

_GIVE_FILE = "Give the model file with --model."


def load_source(
    bundle: Bundle,
    path: Path | None,
    *,
    factory: str | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
) -> Checkpoint:
    """Read the model file of a bundle; without a path, take the module that the factory returns."""
    if bundle.manifest.is_of_onnx:
        raise UsageError(
            f"{bundle.path} was made from an ONNX file, so there is no PyTorch to compare with.",
            "Compare with the stored outputs of the file: leave --model and --reference out.",
        )
    if path is None:
        if allow_pickle:
            raise UsageError("--allow-pickle needs a file, got none.", _GIVE_FILE)
        if factory is None or bundle.manifest.source.get("sha256") is not None:
            raise UsageError(f"{bundle.path} was exported from a file.", _GIVE_FILE)
        return from_factory(factory)
    bundle.check_source(path)
    return load(
        path, factory=factory, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code
    )


def torch_engine(
    bundle: Bundle, source: Checkpoint, *, threads: int = 0, double: bool = False
) -> TorchEngine:
    """Return an engine of a bundle's PyTorch model, in the precision of its file.

    With ``double`` the model runs in float64, which a captured program cannot.
    """
    module = source.module
    if module is None:
        assert source.program is not None  # a checkpoint holds one of the two
        module = source.program.module()
    else:
        inputs = bundle.manifest.inputs
        module = ReferenceModule(module, inputs) if double else with_plain_inputs(module, inputs)
    ranks = {
        name: 3 if head.is_per_token else 2
        for name, head in bundle.manifest.heads.items()
        if head.width == 1
    }
    return TorchEngine(module, bundle.manifest.inputs, threads=threads, ranks=ranks)
