"""HEAD for every GET endpoint: load balancers and monitors use it for health checks."""

from starlette.types import ASGIApp, Receive, Scope, Send


class HeadMiddleware:
    """ASGI middleware that answers HEAD like GET; uvicorn omits the body.

    Args:
        app: the application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        asked = {**scope, "method": "GET"}
        try:
            await self._app(asked, receive, send)
        finally:
            scope["route"] = asked.get("route")  # responses are counted by route
