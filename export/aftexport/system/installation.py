"""Commands that install parts of aftexport, from the place that this copy came from.

The name aftexport is not registered at a package index: a command with only the name could install
another project's package.
"""

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

from aftexport.errors import AftexportError, UsageError

PACKAGE = "aftexport"
_EXTRAS = {
    "torch": "torch",
    "scipy": "calibrate",
    "sklearn": "demo",
    **dict.fromkeys(("anyio", "fastapi", "httptools", "prometheus_client"), "serve"),
    **dict.fromkeys(("pydantic_settings", "starlette", "uvicorn"), "serve"),
    **dict.fromkeys(("grpc", "grpc_health"), "grpc"),
    "argcomplete": "complete",
    "httpx2": "client",
    "ray": "ray",
    "pyarrow": "parquet",
    **dict.fromkeys(("filelock", "jinja2", "loky", "numpy", "onnx", "pydantic"), "cpu"),
    **dict.fromkeys(("rich", "safetensors", "tokenizers"), "cpu"),
    **dict.fromkeys(("onnx_ir", "onnxscript"), "fuse"),
}
"""The extra that brings a module. Commands that lack one of ``bundle`` also lack a runtime."""
_UNKNOWN = "FOLDER_OR_WHEEL_OF_AFTEXPORT"


def install_command(*extras: str) -> str:
    """Return the command that installs extras of this copy of aftexport.

    The command names the folder, the wheel or the URL that the copy was installed from. If it is
    unknown or gone, a word stands in its place.
    """
    chosen = f"[{','.join(extras)}]"
    option, source = _source()
    target = f"{source or _UNKNOWN}{chosen}"
    if source is not None and "://" in source:
        target = f"{PACKAGE}{chosen} @ {source}"
    return f"pip install {option}{shlex.quote(target)}"


def runtime_choice() -> str:
    """Return the command that installs a runtime, and its other choice."""
    return f"{install_command('cpu')}, or with cuda in place of cpu for an NVIDIA GPU"


def missing_module_error(
    error: ModuleNotFoundError, extras: dict[str, str] | None = None
) -> AftexportError | None:
    """Return the error that names the command for a missing module, None for other modules."""
    module = (error.name or "").partition(".")[0]
    extra = {**_EXTRAS, **(extras or {})}.get(module)
    if extra is None:
        return None
    return _missing(module, extra)


def check_installed(module: str) -> None:
    """Check that a module is installed which another process will import."""
    if find_spec(module) is None:
        raise _missing(module, _EXTRAS[module])


@contextmanager
def exit_without_package() -> Iterator[None]:
    """End the process with the command that installs a missing package, for imports of a command.

    Raises:
        SystemExit: with status 2, after the message on standard error.
        ModuleNotFoundError: if no extra brings the missing module.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (missing := missing_module_error(error)) is None:
            raise
        print(f"error: {missing.problem}\n  {missing.remedy}", file=sys.stderr)
        sys.exit(missing.exit_code)


def _missing(module: str, extra: str) -> UsageError:
    command = runtime_choice() if extra == "cpu" else install_command(extra)
    return UsageError(f"This command needs {module}, which is not installed.", f"Run: {command}")


def _source() -> tuple[str, str | None]:
    """Return the option of pip and the place that aftexport was installed from (PEP 610)."""
    try:
        text = metadata.distribution(PACKAGE).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return "", None
    if text is None:
        return "", None
    record = json.loads(text)
    url = record["url"]
    if "vcs_info" in record:
        commit = record["vcs_info"]["commit_id"]
        return "", f"{record['vcs_info']['vcs']}+{url}@{commit}"
    if urlsplit(url).scheme != "file":
        return "", url
    path = unquote(urlsplit(url).path)
    is_editable = record.get("dir_info", {}).get("editable", False)
    return ("--editable " if is_editable else ""), path if Path(path).exists() else None
