"""Who gets an answer, and what a browser may do with it.

Any page that a browser shows can make it send requests here. Three things keep such a page out: a
name that is not ours is refused (see rpcmp.addresses), nothing is allowed to other origins, and the
cookie goes along with none of their requests.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rpcmp import addresses
from rpcmp.page.place import Place

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
"""Of every answer. Nothing is kept: the next run at this address may be another."""


class Guard:
    """Stands before an application.

    Args:
        app: what answers those who are let in.
        place: where it is served.
        let_in: called with the address of each client that is.
    """

    def __init__(self, app: ASGIApp, place: Place, let_in: Callable[[object], None]) -> None:
        self._app = app
        self._let_in = let_in
        self._token = place.token
        self._cookie = f"__Host-rpcmp-{place.port}"
        self._host = place.host if place.token is None else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            return

        cookie = ""

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                if cookie:
                    headers["Set-Cookie"] = cookie
            await send(message)

        headers = Headers(scope=scope)
        if self._host is not None and not addresses.is_own_name(
            headers.get("host", ""), self._host
        ):
            refusal = PlainTextResponse("403: this is not the name of this server\n", 403)
            await refusal(scope, receive, answer)
        elif not self._knows_token(scope, headers):
            text = "403: open the address that `rpcmp drive --ui` printed; it has a token in it\n"
            await PlainTextResponse(text, 403)(scope, receive, answer)
        else:
            self._let_in(scope.get("client"))
            if self._token is not None and self._of_query(scope) is not None:
                kept = "Path=/; Secure; HttpOnly; SameSite=Strict"
                cookie = f"{self._cookie}={self._token}; {kept}"
            await self._app(scope, receive, answer)

    def _knows_token(self, scope: Scope, headers: Headers) -> bool:
        """Whether a request has the token, in its address or as a cookie."""
        if self._token is None:
            return True
        given = self._of_query(scope)
        if given is None:
            given = self._of_cookie(headers.get("cookie", ""))
        return secrets.compare_digest(given.encode(), self._token.encode())

    def _of_query(self, scope: Scope) -> str | None:
        found = parse_qs(scope["query_string"].decode("latin-1")).get("token")
        return None if found is None else found[0]

    def _of_cookie(self, header: str) -> str:
        try:
            found = SimpleCookie(header).get(self._cookie)
        except CookieError:
            return ""
        return "" if found is None else found.value
