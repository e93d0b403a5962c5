"""A server of two bundles with API keys, and the documents that compare its answers."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from bundle_swaps import deploy
from grpc_servers import GrpcServer, serving_grpc

from aftserve.api.api_keys import make_key

TEXTS = ["An invoice.", "Zwei Verträge: 契約 ✉", "long " * 300]


@dataclass(frozen=True)
class RepositoryServer:
    """A server of the models ``a`` and ``b``."""

    server: GrpcServer
    folder: Path
    admin_key: str
    user_key: str

    @property
    def admin(self) -> dict[str, str]:
        """The header of an administrator; Triton's client adds others to the mapping."""
        return {"x-api-key": self.admin_key}

    @property
    def user(self) -> dict[str, str]:
        """The header of a client without this right."""
        return {"x-api-key": self.user_key}


@contextmanager
def serving_models(first: Path, second: Path, folder: Path) -> Iterator[RepositoryServer]:
    """Yield a server of copies of two bundles, which are the models ``a`` and ``b``."""
    (admin, one), (user, two) = make_key("admin", None, admin=True), make_key("user", None)
    (folder / "keys").write_text(f"{one}\n{two}\n")
    a, b = deploy(first, folder / "a.bundle"), deploy(second, folder / "b.bundle")
    options = ("--api-keys", str(folder / "keys"), "--threads", "1")
    with serving_grpc(a, folder / "log", str(b), *options) as server:
        yield RepositoryServer(server, folder, admin, user)


def text_input(triton: Any) -> Any:
    """Return the input of a client of Triton: a module for HTTP or gRPC."""
    tensor = triton.InferInput("text", [len(TEXTS)], "BYTES")
    tensor.set_data_from_numpy(np.array(TEXTS, dtype=object))
    return tensor
