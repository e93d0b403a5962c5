"""HEAD wherever there is GET: balancers and monitors ask so whether a server is well."""

from starlette.types import ASGIApp, Receive, Scope, Send


class HeadRequests:
    """ASGI middleware that has HEAD answered as GET is; uvicorn leaves the body out.

    Args:
        app: the application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the application."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        asked = {**scope, "method": "GET"}
        try:
            await self._app(asked, receive, send)
        finally:
            scope["route"] = asked.get("route")  # by which responses are counted
