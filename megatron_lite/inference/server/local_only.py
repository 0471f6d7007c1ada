"""Protects a server that only this machine can reach from other web pages.

A page of any site can make its visitor's browser send requests to 127.0.0.1; `Origin` then names the page's site. A
page can also point its own host name to that address after it was loaded (DNS rebinding); `Host` is then that name. The
browser sets both headers, and no page can change them.
"""

from collections.abc import Awaitable, Callable
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from megatron_lite.inference.server.errors import OtherSite, Refused


def is_loopback(host: str) -> bool:
    """Return whether a name or address, without port, means only this machine."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


class LocalOnly:
    """Wraps an app: refuses requests with another machine's `Host`, and requests from pages of other sites."""

    def __init__(
        self, app: ASGIApp, own_name: str, refuse: Callable[[str, Refused], Response]
    ) -> None:
        """own_name: the value of `--host`, which may be another name of this machine. refuse: gets the request's path too."""
        self._app, self._own_name, self._refuse = app, own_name.lower(), refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer: Callable[[Scope, Receive, Send], Awaitable[None]] = self._app
        if scope["type"] == "http":
            try:
                self._check(Headers(scope=scope))
            except OtherSite as refused:
                answer = self._refuse(scope["path"], refused)
        await answer(scope, receive, send)

    def _check(self, headers: Headers) -> None:
        hosts = headers.getlist("host") or [""]
        for host in hosts:
            name = _hostname(host)
            if not (name == self._own_name or is_loopback(name)):
                raise OtherSite(
                    f"the header Host names {host[:100]!r}, and this server answers localhost alone; --host opens it for others"
                )
        for origin in headers.getlist("origin"):
            if origin.lower().partition("://")[2] != hosts[0].lower():
                raise OtherSite(
                    f"the page of another site asks (Origin: {origin[:100]!r}); --host opens the server for others"
                )


def _hostname(host: str) -> str:
    """Return the host in lower case without its port; empty if there is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
