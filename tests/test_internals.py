"""Private parts of libraries are used from one module each, and the installed versions have them.

A test that fails here names the missing part. Then either its module learns the part's new name, or
the library gets an upper bound in pyproject.toml.
"""

import ast
import asyncio
import importlib
import inspect
import platform
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn
from packaging.requirements import Requirement
from packaging.version import Version
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from aftexport.errors import LibraryError
from aftexport.system.internals.torch_shapes import example_sizes
from aftexport.system.internals.torch_translation import ONNXRegistry
from aftexport.system.internals.versions import Versions

ROOT = Path(__file__).parents[1]
MODULES = (
    "aftexport.system.internals.onnxscript_rules",
    "aftexport.system.internals.python_exit",
    "aftexport.system.internals.torch_operators",
    "aftexport.system.internals.torch_shapes",
    "aftexport.system.internals.torch_translation",
    "aftserve.http.uvicorn_internals",
)
TRANSLATIONS = "aftexport.capture.module_translations"
"""The module that names the versions of transformers whose functions are translated."""
LIBRARIES = ("torch", "onnxscript", "onnx_ir", "uvicorn", "atexit", "threading")
UNSTABLE = ("torch.fx.experimental", "torch.fx.traceback", "uvicorn.protocols")
"""Modules without an underscore whose parts also change between versions."""


def protocol() -> HttpToolsProtocol:
    config = uvicorn.Config("builtins:print", log_config=None, ws="none")
    loop = asyncio.new_event_loop()
    made = HttpToolsProtocol(config, ServerState(), {}, _loop=loop)
    loop.close()
    made.on_message_begin()
    return made


def cycle() -> RequestResponseCycle:
    nothing: Any = None
    return RequestResponseCycle(
        scope=nothing,
        transport=nothing,
        flow=nothing,
        logger=nothing,
        access_logger=nothing,
        access_log=False,
        default_headers=[],
        message_event=nothing,
        expect_100_continue=False,
        keep_alive=True,
        on_response=print,
    )


INSTANCES: dict[str, Callable[[], object]] = {
    "HttpToolsProtocol": protocol,
    "ONNXRegistry": ONNXRegistry,
    "OpOverload": lambda: torch.ops.aten.add.Tensor,
    "RequestResponseCycle": cycle,
    "ShapeEnv": ShapeEnv,
}
"""For each class whose attributes are set by its constructor, a function that makes an instance."""


def source_of(module: str) -> Path:
    home = "serve" if module.startswith("aftserve") else "export"
    return ROOT / home / Path(*module.split(".")).with_suffix(".py")


def imports_of(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the module and the name of each ``from module import name``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.module, alias.name) for alias in node.names)


def parts_of(module: str) -> list[str]:
    """The parts that a module imports while it names the missing one."""
    tree = ast.parse(source_of(module).read_text("utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.With)]
    assert blocks, "expected imports within `with VERSIONS.named()`"
    return [".".join(pair) for block in blocks for pair in imports_of(block)]


@pytest.mark.parametrize("part", sorted({part for module in MODULES for part in parts_of(module)}))
def test_part_exists(part: str) -> None:
    module, _, name = part.rpartition(".")
    found = importlib.import_module(module)
    assert hasattr(found, name) or importlib.import_module(part)


@pytest.mark.parametrize(
    ("module", "attribute"),
    [(m, a) for m in MODULES for a in importlib.import_module(m).ATTRIBUTES],
)
def test_attribute_exists(module: str, attribute: str) -> None:
    owner, _, name = attribute.partition(".")
    found: object
    if owner.endswith("()"):
        found = INSTANCES[owner.removesuffix("()")]()
    else:
        found = getattr(importlib.import_module(module), owner)
    assert hasattr(found, name)


def test_observed_methods_have_known_parameters() -> None:
    """``observe_conditions`` replaces them."""
    log = inspect.signature(ShapeEnv._log_guard).parameters
    assert list(log) == ["self", "prefix", "g", "forcing_spec"]
    decide = inspect.signature(ShapeEnv._maybe_evaluate_static).parameters
    assert list(decide)[:2] == ["self", "expr"]
    assert example_sizes(ShapeEnv()) == {}


@pytest.mark.parametrize("module", [*MODULES, TRANSLATIONS])
def test_versions_agree_with_requirements(module: str) -> None:
    versions: Versions = importlib.import_module(module).VERSIONS
    content = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    project = content["project"]
    groups = [*project["optional-dependencies"].values(), content["dependency-groups"]["test"]]
    wanted = [Requirement(text) for texts in groups for text in texts if isinstance(text, str)]
    wanted.append(Requirement(f"python {project['requires-python']}"))
    (bounds,) = {r.specifier for r in wanted if r.name == versions.library}
    assert f">={versions.oldest}" in str(bounds)
    assert Version(versions.newest) in bounds


def is_private(name: str) -> bool:
    parts = name.split(".")
    unstable = any(name == one or name.startswith(f"{one}.") for one in UNSTABLE)
    return unstable or any(part.startswith("_") for part in parts)


def dotted(node: ast.expr) -> str:
    """Return an expression as names and dots, without the arguments of its calls."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Call):
        return dotted(node.func)
    if isinstance(node, ast.Subscript):
        return dotted(node.value)
    return node.id if isinstance(node, ast.Name) else ""


def private_uses(tree: ast.AST) -> Iterator[str]:
    """Yield the private parts of the libraries that a module imports or reaches by their name."""
    for module, name in imports_of(tree):
        if module.partition(".")[0] in LIBRARIES and is_private(f"{module}.{name}"):
            yield f"{module}.{name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute) and not node.attr.startswith("__"):
            names = [dotted(node)]
        else:
            continue
        for name in names:
            if name.partition(".")[0] in LIBRARIES and is_private(name):
                yield name


def test_private_parts_have_one_user() -> None:
    listed = {source_of(module) for module in MODULES}
    files = [f for home in ("export", "plugins", "serve") for f in (ROOT / home).rglob("*.py")]
    found = {
        f"{file.relative_to(ROOT)}: {use}"
        for file in files
        if file not in listed
        for use in private_uses(ast.parse(file.read_text("utf-8")))
    }
    assert not found


@pytest.mark.parametrize(
    "code",
    [
        "from torch._ops import OpOverload",
        "import torch\ntorch._C.PyTorchFileReader('x')",
        "from uvicorn.protocols.http.flow_control import FlowControl",
        "import torch.fx.experimental.symbolic_shapes",
        "import threading\nthreading._shutdown()",
    ],
)
def test_private_use_is_found(code: str) -> None:
    assert list(private_uses(ast.parse(code)))


def test_missing_part_is_named_with_versions() -> None:
    with pytest.raises(LibraryError) as raised, Versions("uvicorn", "0.46", "0.54").named():
        raise ImportError("cannot import name 'Cycle' from 'uvicorn.protocols'")
    assert raised.value.problem == (
        f"Expected uvicorn 0.46 to 0.54, got {uvicorn.__version__}, which lacks a part: cannot "
        "import name 'Cycle' from 'uvicorn.protocols'."
    )
    assert raised.value.remedy == "Install uvicorn 0.54, or a newer aftexport."


def test_missing_part_of_python_is_named() -> None:
    with pytest.raises(LibraryError) as raised, Versions("python", "3.11", "3.14").named():
        raise AttributeError("module 'threading' has no attribute '_shutdown'")
    assert f"Expected python 3.11 to 3.14, got {platform.python_version()}," in str(raised.value)


def test_absent_library_raises_module_error() -> None:
    """The command line names the extra to install."""
    with pytest.raises(ModuleNotFoundError), Versions("uvicorn", "0.46", "0.54").named():
        raise ModuleNotFoundError("No module named 'uvicorn'", name="uvicorn")
