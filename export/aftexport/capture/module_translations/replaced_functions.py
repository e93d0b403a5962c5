"""The replacement of known functions of transformers while a model is captured.

The functions are globals of the library's files, which the whole process shares. Only the thread
of the capture runs the replacements; every other thread, such as one that runs the model, runs the
library's own functions.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from aftexport.capture.module_translations.causal_convolution import CAUSAL_CONVOLUTION
from aftexport.capture.module_translations.causal_mask import CAUSAL_MASK
from aftexport.capture.module_translations.function_translation import (
    VERSIONS,
    FunctionTranslation,
    installed_version,
    is_of_transformers,
)
from aftexport.capture.module_translations.gated_delta_rule import GATED_DELTA_RULE, KIMI_DELTA_RULE
from aftexport.capture.module_translations.state_space_scan import STATE_SPACE_SCAN
from aftexport.errors import TraceError
from aftexport.nn.export_form import export_forms, exported_as

TRANSLATIONS = (
    GATED_DELTA_RULE,
    KIMI_DELTA_RULE,
    STATE_SPACE_SCAN,
    CAUSAL_CONVOLUTION,
    CAUSAL_MASK,
)
_LOCK = threading.RLock()


@contextmanager
def translate_functions(model: nn.Module) -> Iterator[None]:
    """Run known functions of a model, and those of ``exported_as``, in their form for an export.

    Args:
        model: the model, whose classes tell in which files of transformers to look.
    """
    with _LOCK, export_forms():  # the files of the library are shared by the whole process
        places = [
            (space, translation.name, space[translation.name], translation)
            for space, translation in _places(model)
            if translation.fits(space[translation.name])
        ]
        for space, name, own, translation in places:
            space[name] = exported_as(translation.replacement)(own)
        try:
            yield
        finally:
            for space, name, own, _ in places:
                space[name] = own


def refuse_unknown_functions(model: nn.Module) -> None:
    """Raise an error for a loop over tokens whose form in the installed version is unknown.

    Raises:
        TraceError: if a recurrence of the model is not translated.
    """
    for space, translation in _places(model):
        if translation.has_loop and not translation.fits(space[translation.name]):
            raise TraceError(
                f"Expected {translation.name} of {VERSIONS.library} {VERSIONS.oldest} to "
                f"{VERSIONS.newest}, which is translated, got that of {installed_version()}.",
                f"Install {VERSIONS.library} {VERSIONS.newest}, or a newer aftexport.",
            )


def _places(model: nn.Module) -> list[tuple[dict[str, Any], FunctionTranslation]]:
    """Return the globals of the library's files with a recurrence, and their known functions."""
    files = {type(module).__module__ for module in model.modules()}
    spaces = [vars(sys.modules[name]) for name in sorted(files) if is_of_transformers(name)]
    recurrences = {known.name for known in TRANSLATIONS if known.has_loop}
    spaces = [space for space in spaces if not recurrences.isdisjoint(space)]
    return [(space, known) for space in spaces for known in TRANSLATIONS if known.name in space]
