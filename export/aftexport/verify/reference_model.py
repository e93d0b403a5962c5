"""The PyTorch model of a bundle, which the bundle does not contain."""

from aftexport.bundle.bundle import Bundle
from aftexport.capture.model_inputs import with_plain_inputs
from aftexport.capture.reference_module import ReferenceModule
from aftexport.checkpoint import Checkpoint, load
from aftexport.engines.torch import TorchEngine
from aftexport.errors import UsageError
from aftexport.options import ModelSource, StrPath, as_source

_GIVE_FILE = "Give the model file with --model."


def load_source(bundle: Bundle, source: StrPath | ModelSource) -> Checkpoint:
    """Read the model file of a bundle, or call the factory of a bundle without a file.

    Raises:
        UsageError: if the file is not that of the bundle; see ``Bundle.check_source``.
        CheckpointError: if the file cannot be read.
    """
    source = as_source(source)
    if bundle.manifest.is_of_onnx:
        raise UsageError(
            f"{bundle.path} was made from an ONNX file, so there is no PyTorch to compare with.",
            "Compare with the stored outputs of the file: leave --model and --reference out.",
        )
    if source.file is not None:
        bundle.check_source(source.file)
    elif source.allow_pickle:
        raise UsageError("--allow-pickle needs a file, got none.", _GIVE_FILE)
    elif source.factory is None or bundle.manifest.source.get("sha256") is not None:
        raise UsageError(f"{bundle.path} was exported from a file.", _GIVE_FILE)
    return load(source)


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
