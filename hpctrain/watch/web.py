"""The page for the browser, served on the loopback address of this machine until Ctrl-C.

On a login node every user can reach that address, so each request must carry the token, which is
part of the printed URL only: neither another user nor the page of another site knows it.
"""

from __future__ import annotations

import json
import re
import secrets
import socket
from contextlib import suppress
from importlib.resources import files
from socketserver import ThreadingMixIn
from threading import Thread
from typing import Any, NamedTuple
from urllib.parse import parse_qsl
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from hpctrain.errors import UsageError
from hpctrain.files import writing
from hpctrain.text import check_output, say
from hpctrain.watch.runs import WatchedRuns

ADDRESS = "127.0.0.1"
HEADERS = [
    ("Cache-Control", "no-store"),
    ("Referrer-Policy", "no-referrer"),
]


def serve(runs: WatchedRuns, port: int) -> int:
    """Serve until Ctrl-C. Raises UsageError if the port cannot be used."""
    try:
        server = Server(runs, port)
    except OSError as error:
        raise UsageError(f"--port {port}: {error.strerror}") from error
    Thread(target=runs.follow, daemon=True).start()
    with server, suppress(KeyboardInterrupt):
        port = server.server_port
        say(f"http://{ADDRESS}:{port}/?token={server.token}")
        tunnel = f"ssh -L {port}:{ADDRESS}:{port} {socket.gethostname()}"
        say(f"from your own machine, first: {tunnel}")
        say("Ctrl-C ends the page, not the runs")
        with writing("standard output"):
            check_output()  # nobody would know the address
        server.serve_forever()
    return 0


class Response(NamedTuple):
    """The response to a request: the page, or data that are sent as JSON."""

    content: Any
    status: str = "200 OK"


class Server(ThreadingMixIn, WSGIServer):
    """The server, with a thread per connection: browsers open some that they do not use."""

    daemon_threads = True

    def __init__(self, runs: WatchedRuns, port: int = 0) -> None:
        super().__init__((ADDRESS, port), Handler)
        self.set_app(self.respond)
        self.token = secrets.token_urlsafe(32)
        self._runs = runs
        folder = files("hpctrain.watch") / "page"
        page = (folder / "page.html").read_text("utf-8")
        self._page = page.replace("[[nonce]]", secrets.token_hex())
        for part in ("uPlot.min.css", "uPlot.iife.min.js", "page.js"):
            self._page = self._page.replace(f"[[{part}]]", (folder / part).read_text("utf-8"))

    def respond(self, environ: dict[str, Any], start_response: Any) -> list[bytes]:
        """Send the page, the data of all runs, or the curves of one; a POST asks a run to stop."""
        response = self._response(environ)
        kind = "text/html" if response.content is self._page else "application/json"
        headers = [("Content-Type", f"{kind}; charset=utf-8"), *HEADERS]
        start_response(response.status, headers)
        if response.content is self._page:
            return [self._page.encode()]
        return [json.dumps(response.content).encode()]

    def _response(self, environ: dict[str, Any]) -> Response:
        method = environ["REQUEST_METHOD"]
        path = environ["PATH_INFO"]
        query = dict(parse_qsl(environ["QUERY_STRING"]))
        run = self._runs.all.get(query.get("run", ""))
        sort = query.get("sort", "-1")
        if not secrets.compare_digest(query.get("token", "").encode(), self.token.encode()):
            return Response("open the address that was printed", status="403 Forbidden")
        if path in ("/", "/data", "/curves") and method != "GET":
            return Response("give GET", status="405 Method Not Allowed")
        if not re.fullmatch("-?[0-9]{1,4}", sort):
            return Response("sort is the number of a column", status="400 Bad Request")
        if path == "/":
            return Response(self._page)
        if path == "/data":
            return Response(self._runs.table(int(sort)))
        if run and path == "/curves":
            return Response(run.curves())
        if run and path == "/stop" and method == "POST":
            return Response(run.stop())
        return Response("there is nothing here", status="404 Not Found")

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of a connection, such as a browser that closed it."""


class Handler(WSGIRequestHandler):
    """Handles one request."""

    timeout = 30  # seconds to wait for it: no one holds threads without the token

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because URLs contain the token."""
