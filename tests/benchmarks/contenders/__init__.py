"""The contenders: every module of this folder adds its ``CONTENDERS``, and its ``ENCODERS``."""

from importlib import import_module
from pkgutil import iter_modules

from benchmarks.contenders.contender import Contender, ModelContender, OperatorContender


def discover() -> tuple[list[Contender], list[ModelContender], dict[str, str]]:
    """Return the contenders of all modules, and why a module cannot be imported here."""
    found: list[Contender] = []
    encoders: list[ModelContender] = []
    missing: dict[str, str] = {}
    for module in iter_modules(__path__):
        try:
            loaded = import_module(f"{__name__}.{module.name}")
        except ModuleNotFoundError as error:
            missing[module.name] = f"{error}. Run: make build/peers/installed"
        else:
            found += getattr(loaded, "CONTENDERS", ())
            encoders += getattr(loaded, "ENCODERS", ())
    return found, encoders, missing


CONTENDERS, _encoders, MISSING = discover()
"""All contenders, in the order of their modules; and why a module cannot be imported here."""
MODELS = {c.name: c for c in CONTENDERS if isinstance(c, ModelContender)}
OPERATORS = {c.name: c for c in CONTENDERS if isinstance(c, OperatorContender)}
ENCODERS = {c.name: c for c in _encoders}
"""Those that run encoders of transformers."""
