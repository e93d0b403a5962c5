"""The HTTP server over a bundle, and its answers in a Python process. Needs no torch."""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aftserve.predictor import Predictor

__all__ = ["Predictor"]


def __getattr__(name: str) -> Any:
    # On demand, as `aftserve --help` and the client need nothing of the engine.
    if name == "Predictor":
        from aftserve.predictor import Predictor

        return Predictor
    raise AttributeError(f"module 'aftserve' has no attribute {name!r}")


def __dir__() -> list[str]:
    has_engine = find_spec("onnxruntime") is not None  # help() reads each name
    return sorted({*globals(), *(__all__ if has_engine else ())})
