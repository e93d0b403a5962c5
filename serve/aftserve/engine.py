"""Which engine runs the bundle: the one place where that is chosen."""

from aftexport.bundle import Bundle
from aftexport.engines import Engine
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftserve.settings import Settings


def load_engine(bundle: Bundle, settings: Settings, *, safe: bool = False) -> Engine:
    """Loads the model of a bundle.

    Args:
        bundle: a checked bundle.
        settings: of the server.
        safe: in standard operators alone, without kernels of our own.

    Raises:
        EngineError: where the runtime refuses it.
    """
    return OnnxRuntimeEngine(
        bundle.model_path,
        threads=settings.threads or 0,
        arena=settings.arena,
        fused=not safe,
    )
