"""Caches of states for generation, which a captured forward does not need."""

from torch import nn

from aftexport.capture.module_translations.function_translation import is_of_transformers


def switch_off_caches(model: nn.Module) -> None:
    """Make models of transformers inside a module run without a cache; results stay the same.

    Mamba-2 makes one by default, with branches on the number of tokens.

    Args:
        model: the module, whose configurations are changed in place.
    """
    for module in model.modules():
        config = getattr(module, "config", None)
        if is_of_transformers(type(module).__module__) and getattr(config, "use_cache", False):
            config.use_cache = False  # type: ignore[union-attr]
