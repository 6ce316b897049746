"""A prefix of all paths, for a server behind a proxy (`--root-path`)."""

from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

_KEY = "nanoserve.path"


class RootPath:
    """ASGI middleware that removes a prefix from paths, so that nothing behind it knows of it.

    A proxy may remove the prefix itself or keep it: paths without it are served as well. What wraps
    this middleware, such as the handler of unexpected exceptions, calls `path_of`.
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app, self._root_path = app, root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path == self._root_path and scope["method"] in ("GET", "HEAD"):
            # The page's links are relative, so its address needs the slash. This one is relative,
            # too: the host that the client has sent is not repeated.
            await RedirectResponse(f"{path.rpartition('/')[2]}/")(scope, receive, send)
            return
        if path.startswith(f"{self._root_path}/"):
            raw = scope.get("raw_path")
            prefix = self._root_path.encode()
            scope[_KEY] = path.removeprefix(self._root_path)
            scope = {  # a copy: the access log has the client's path
                **scope,
                "path": scope[_KEY],
                "raw_path": raw.removeprefix(prefix) if isinstance(raw, bytes) else raw,
            }
        await self._app(scope, receive, send)


def path_of(scope: Scope) -> str:
    """Return the path of a request without the prefix, also outside of the middleware."""
    path: str = scope.get(_KEY) or scope["path"]
    return path
