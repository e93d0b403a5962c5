"""The files of the web page, with headers that confine the browser to this server."""

import re
from collections.abc import Awaitable, Callable
from hashlib import sha256
from importlib.resources import files
from urllib.parse import quote

from fastapi import APIRouter, Request, Response

from aftserve.api.model_choice import OPEN, PREFIX
from aftserve.errors import NotFoundError

_FILES = {
    "/": ("index.html", "text/html"),
    "/page/page.css": ("page.css", "text/css"),
    "/page/page.js": ("page.js", "text/javascript"),
    "/page/elements.js": ("elements.js", "text/javascript"),
    "/page/files.js": ("files.js", "text/javascript"),
    "/page/heads.js": ("heads.js", "text/javascript"),
    "/page/models.js": ("models.js", "text/javascript"),
    "/page/inputs.js": ("inputs.js", "text/javascript"),
    "/page/program.js": ("program.js", "text/javascript"),
    "/page/series.js": ("series.js", "text/javascript"),
    "/page/series_field.js": ("series_field.js", "text/javascript"),
    "/page/tokens.js": ("tokens.js", "text/javascript"),
}
_POLICY = (
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "connect-src 'self'",
    "img-src data:",  # the icon
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
    # Text never becomes markup or a script, even by an error in the page's code.
    "require-trusted-types-for 'script'",
    "trusted-types 'none'",
)
_HEADERS = {
    "Content-Security-Policy": "; ".join(_POLICY),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",  # the browser asks each time, and gets 304 for the same file
}


def create_router() -> APIRouter:
    """Build the endpoints of the page; they need no API key and are not in the OpenAPI document."""
    router = APIRouter(include_in_schema=False, dependencies=OPEN)
    for path, (name, media_type) in _FILES.items():
        router.add_api_route(path, _file(name, media_type))

    # The page there would look for its files beside the model, not below it.
    @router.api_route(f"{PREFIX}{{name}}", methods=["GET", "POST"])
    async def without_slash(name: str) -> None:
        address = PREFIX + quote(name)
        raise NotFoundError(
            f"Expected an address below {address}/, got {address}.",
            f"The page of the model is {address}/.",
        )

    return router


def _file(name: str, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    content = (files("aftserve.api.page") / name).read_bytes()
    tag = f'"{sha256(content).hexdigest()[:32]}"'
    headers = _HEADERS | {"ETag": tag}

    async def file(request: Request) -> Response:
        # A proxy that compresses makes the tag weak: W/"...".
        if tag in re.findall(r'"[^"]*"', request.headers.get("if-none-match", "")):
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=media_type, headers=headers)

    return file
