"""The door of the dashboard: who may ask, what for, and what a browser is told to refuse in turn.

An ASGI layer around the whole application, so that no answer gets out without its headers and no request in without
these questions. A request has to name a host that cannot be somebody else's name for this address: a web page that
resolves its own name to 127.0.0.1 (DNS rebinding) gets nothing. The token has to be brought, as `Authorization:
Bearer`, or once as `?token=`, which becomes a cookie and leaves the address: every user of a machine reaches its
loopback address. Only GET and HEAD are known.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlencode

import attrs

from resilience_sdk.errors import ConfigError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

NO_TOKEN = "none"  # noqa: S105 - the word that refuses one
OPEN = "/static/"  # files of this package, which the page that asks for the token needs as well
_METHODS = ("GET", "HEAD")
_LONGEST_TOKEN = 256
_RANDOM_BYTES = 24
_LONGEST_QUERY = 4096
_NAMES_OF_LOOPBACK = frozenset({"localhost"})

# Whatever a text of a job may become by a mistake of ours: no script, style, picture or connection but our own.
POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self' data:",
    "font-src": "'none'",
    "connect-src": "'self'",
    "form-action": "'self'",
    "base-uri": "'none'",
    "frame-ancestors": "'none'",
}
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


def policy(more: Mapping[str, str] | None = None) -> str:
    """Return the content policy as a header has it; `more` are further sources, by directive."""
    added = more or {}
    return "; ".join(f"{name} {sources} {added.get(name, '')}".strip() for name, sources in POLICY.items())


def token_of(text: str | None) -> str | None:
    """Return the token that has to be brought: what the variable holds, None for `none`, else a new random one.

    Raises:
        ConfigError: It holds what no request could bring.
    """
    if text == NO_TOKEN:
        return None
    if text and (len(text) > _LONGEST_TOKEN or not all("!" <= c <= "~" for c in text)):
        raise ConfigError("RESILIENCE_DASHBOARD_TOKEN: expected 1 to 256 visible ASCII characters")
    return text or secrets.token_urlsafe(_RANDOM_BYTES)


@attrs.frozen
class Hosts:
    """The names by which a request may call this server, without ports."""

    names: frozenset[str] = frozenset()

    def allows(self, header: str | None) -> bool:
        """Tell whether a `Host` header is one: a name of ours, or a plain address, which no name server can turn."""
        host = _without_port(header or "")
        if host in _NAMES_OF_LOOPBACK or host in self.names:
            return True
        try:
            ipaddress.ip_address(host.strip("[]"))
        except ValueError:
            return False
        return True

    @classmethod
    def of(cls, *names: str) -> Hosts:
        """Return those with these names."""
        return cls(frozenset(name.lower().rstrip(".") for name in names if name))


def _without_port(header: str) -> str:
    host = header.strip().lower()
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0].rstrip(".")


@attrs.frozen
class Pass:
    """The token, and the cookie that it becomes: another value, so that the cookie does not give the token away."""

    token: str
    cookie: str = attrs.field(init=False)
    value: str = attrs.field(init=False)

    @cookie.default
    def _cookie(self) -> str:
        # Cookies know no port: two dashboards of one host with different tokens must not take each other's.
        return f"resilience_{self._derived('name')[:8]}"

    @value.default
    def _value(self) -> str:
        return self._derived("value")

    def _derived(self, what: str) -> str:
        return hmac.new(self.token.encode(), f"resilience dashboard {what}".encode(), hashlib.sha256).hexdigest()

    def is_token(self, given: str) -> bool:
        """Tell whether that is the token, in a time that does not depend on how much of it is right."""
        return hmac.compare_digest(given.encode("utf-8", "replace"), self.token.encode())

    def is_brought(self, headers: dict[str, str]) -> bool:
        """Tell whether a request brings it, as a header or as the cookie."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self.is_token(given.strip()):
            return True
        # Not `http.cookies`, which forgets what stands behind a cookie of somebody else that it does not like.
        for cookie in headers.get("cookie", "").split(";"):
            name, _, value = cookie.strip().partition("=")
            if name == self.cookie and hmac.compare_digest(value.encode("utf-8", "replace"), self.value.encode()):
                return True
        return False

    def set_cookie(self) -> str:
        """Return the header that sets it."""
        return f"{self.cookie}={self.value}; HttpOnly; SameSite=Strict; Path=/"


class Door:
    """The layer around an application: headers on every answer, and questions to every request."""

    def __init__(
        self, app: ASGIApp, hosts: Hosts, token: str | None, message: Callable[[int, str, str, bool], bytes]
    ) -> None:
        """Let in who asks in order; `message(status, title, text, asks_for_token)` is the page for who does not."""
        self._app = app
        self._hosts = hosts
        self._pass = None if token is None else Pass(token)
        self._message = message

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": _guarded(message.get("headers", ()))}
            await send(message)

        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if scope["method"] not in _METHODS:
            await self._refuse(send_guarded, scope, 405, "Only for looking", "This page only reads.", allow=True)
        elif not self._hosts.allows(headers.get("host")):
            await self._refuse(
                send_guarded, scope, 421, "Another host",
                "The request named a host that this dashboard does not know as its own. Where it is reached by that "
                "name on purpose, start it with --allow-host NAME.",
            )  # fmt: skip
        elif self._pass is None or scope["path"].startswith(OPEN) or self._pass.is_brought(headers):
            if self._pass is not None and _token_in(scope) is not None:
                await _redirect(send_guarded, scope)
            else:
                await self._app(scope, receive, send_guarded)
        elif (given := _token_in(scope)) is not None and self._pass.is_token(given):
            await _redirect(send_guarded, scope, self._pass.set_cookie())
        else:
            text = (
                "This dashboard is shown to those who have its token: it is in the address that was printed where the "
                "dashboard was started, unless RESILIENCE_DASHBOARD_TOKEN was set there."
            )
            await self._refuse(send_guarded, scope, 401, "Token needed", text, asks_for_token=True)

    async def _refuse(
        self, send: Send, scope: Scope, status: int, title: str, text: str, *, allow: bool = False,
        asks_for_token: bool = False,
    ) -> None:  # fmt: skip
        body = self._message(status, title, text, asks_for_token)
        headers = [(b"content-type", b"text/html; charset=utf-8"), (b"content-length", str(len(body)).encode())]
        headers += [(b"allow", b"GET, HEAD")] if allow else []
        headers += [(b"www-authenticate", b"Bearer")] if asks_for_token else []
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})


def _guarded(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Add what every answer has; what an answer says itself stays."""
    kept = list(headers)
    names = {name.lower() for name, _ in kept}
    wanted = {**_HEADERS, "Content-Security-Policy": policy()}
    return kept + [
        (name.lower().encode(), value.encode()) for name, value in wanted.items() if name.lower().encode() not in names
    ]


def _token_in(scope: Scope) -> str | None:
    query = scope.get("query_string", b"")[:_LONGEST_QUERY].decode("latin-1")
    return next((value for name, value in parse_qsl(query) if name == "token"), None)


async def _redirect(send: Send, scope: Scope, cookie: str | None = None) -> None:
    """Lead to the same page without the token in its address."""
    query = scope.get("query_string", b"")[:_LONGEST_QUERY].decode("latin-1")
    left = urlencode([(name, value) for name, value in parse_qsl(query) if name != "token"])
    raw = scope.get("raw_path") or scope["path"].encode("utf-8", "replace")
    # One slash: what begins with two would name another host.
    path = "/" + raw.decode("latin-1").partition("?")[0].lstrip("/\\")
    location = path + (f"?{left}" if left else "")
    headers = [(b"location", location.encode("latin-1")), (b"content-length", b"0")]
    headers += [(b"set-cookie", cookie.encode())] if cookie is not None else []
    await send({"type": "http.response.start", "status": 303, "headers": headers})
    await send({"type": "http.response.body", "body": b""})
