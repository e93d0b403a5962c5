"""The PyTorch model a bundle was exported from, which the bundle does not hold."""

from pathlib import Path

from aftexport.bundle.bundle import Bundle
from aftexport.capture.forward_signature import with_plain_inputs
from aftexport.capture.reference_module import ReferenceModule
from aftexport.checkpoint import Checkpoint, from_factory, load
from aftexport.engines.torch import TorchEngine
from aftexport.errors import UsageError

_GIVE_FILE = "Give it by --model."


def load_source(
    bundle: Bundle, path: Path | None, *, factory: str | None = None, allow_pickle: bool = False
) -> Checkpoint:
    """Reads the file a bundle was exported from.

    Args:
        bundle: the exported model.
        path: the file or folder it was exported from, as ``aftexport.load`` reads it; None for
            the module as the factory returns it, where there was none.
        factory: ``package.module:callable`` for a bare state dict.
        allow_pickle: load a pickled module, which runs code from the file.

    Raises:
        UsageError: as ``Bundle.check_source`` has it.
        CheckpointError: where the file cannot be read.
    """
    if path is None:
        if allow_pickle:
            raise UsageError("--allow-pickle is for a file, and none is given.", _GIVE_FILE)
        if factory is None or bundle.manifest.source.get("sha256") is not None:
            raise UsageError(f"{bundle.path} was exported from a file.", _GIVE_FILE)
        return from_factory(factory)
    bundle.check_source(path)
    return load(path, factory=factory, allow_pickle=allow_pickle)


def torch_engine(
    bundle: Bundle, source: Checkpoint, *, threads: int = 0, double: bool = False
) -> TorchEngine:
    """A bundle's source in PyTorch, in the precision it is stored in.

    Args:
        bundle: the exported model.
        source: what it was exported from.
        threads: of PyTorch; 0 for its own choice.
        double: run it in float64 where it can, the truth; a captured program cannot.
    """
    module = source.module
    if module is None:
        assert source.program is not None  # a checkpoint holds one of the two
        module = source.program.module()
    else:
        module = ReferenceModule(module) if double else with_plain_inputs(module)
    return TorchEngine(module, bundle.manifest.inputs, threads=threads)
