"""Parts of a model in TorchScript, whose code torch.export cannot read."""

from torch import nn
from torch.jit import ScriptFunction, ScriptModule


def scripted_parts(model: nn.Module) -> list[str]:
    """Return the names of scripted modules, outermost only, and of scripted functions."""
    names: list[str] = []
    for name, module in model.named_modules():
        if any(name == whole or name.startswith(f"{whole}.") or not whole for whole in names):
            continue
        if isinstance(module, ScriptModule):
            names.append(name)
    return names + [name for module in model.modules() for name in _functions(module)]


def _functions(module: nn.Module) -> list[str]:
    if isinstance(module, ScriptModule):
        return []
    code = getattr(type(module).forward, "__code__", None)
    if code is None:
        return []
    scope = getattr(type(module).forward, "__globals__", {})
    values = {name: scope.get(name, vars(module).get(name)) for name in code.co_names}
    return [name for name, value in values.items() if isinstance(value, ScriptFunction)]
