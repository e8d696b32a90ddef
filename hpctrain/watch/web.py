"""The page for the browser, served on the loopback address of this machine until Ctrl-C.

On a login node every user can reach that address, so each request must carry the token, which is
part of the printed URL only. The Host header is checked (a foreign name that resolves to 127.0.0.1
is refused), a stop must be a POST from the page itself (Origin), and the Content-Security-Policy
lets the page load nothing but its own parts. The curves are drawn by uPlot, which is part of the
page.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs

from hpctrain.errors import Failure, UsageError
from hpctrain.text import say
from hpctrain.watch.runs import WatchedRuns

ADDRESS = "127.0.0.1"
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
POLICY = (
    "default-src 'none'; script-src 'nonce-NONCE'; style-src 'nonce-NONCE'; connect-src 'self';"
    " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def serve(runs: WatchedRuns, port: int) -> int:
    """Serve until Ctrl-C. Raises UsageError if the port cannot be used."""
    try:
        server = Server(runs, port)
    except OSError as error:
        raise UsageError(f"--port {port}: {error.strerror}") from error
    port = server.server_address[1]
    host = socket.getfqdn()
    host = socket.gethostname() if host.startswith("localhost") else host
    runs.follow()
    with server, suppress(KeyboardInterrupt):
        say(f"http://{ADDRESS}:{port}/?token={server.token}")
        say(f"from your own machine, first: ssh -L {port}:{ADDRESS}:{port} {host}")
        say("Ctrl-C ends the page, not the runs")
        server.serve_forever()
    return 0


class Server(ThreadingHTTPServer):
    """The HTTP server. It holds the token and the runs."""

    daemon_threads = True

    def __init__(self, runs: WatchedRuns, port: int = 0) -> None:
        super().__init__((ADDRESS, port), Handler)
        self.token, self.runs = secrets.token_urlsafe(32), runs

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of a connection, such as a browser that closed it."""


class Handler(BaseHTTPRequestHandler):
    """Handles one request."""

    server: Server
    server_version, sys_version = "hpctrain", ""
    timeout = 30  # seconds to wait for a request

    def respond(self) -> None:
        """Send the page, the data of all runs, or the curves of one; a POST asks a run to stop."""
        path, _, text = self.path.partition("?")
        query = {name: values[0] for name, values in parse_qs(text).items()}
        run = self.server.runs.get(query.get("run", ""))
        if not self._is_allowed(query.get("token", "")):
            self._send("refused: open the address that was printed\n", 403, "text/plain")
        elif (self.command, path) == ("GET", "/"):
            self._send_page()
        elif (self.command, path) == ("GET", "/data"):
            columns, rows = self.server.runs.table()
            self._send({"columns": columns, "runs": rows})
        elif run and (self.command, path) == ("GET", "/curves"):
            self._send({"key": run.key, "version": run.history.version} | run.curves())
        elif run and (self.command, path) == ("POST", "/stop"):
            try:
                self._send({"text": run.stop()})
            except Failure as error:
                self._send({"text": str(error)}, 409)
        else:
            self._send("there is nothing here\n", 404, "text/plain")

    do_GET = do_POST = respond

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because URLs contain the token."""

    def _is_allowed(self, token: str) -> bool:
        """Whether a request has the token and comes from this server's own page."""
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        if not hmac.compare_digest(token.encode(), self.server.token.encode()):
            return False
        if host.rpartition(":")[0] not in (ADDRESS, "localhost"):
            return False
        if self.headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
            return False
        return origin == f"http://{host}" if self.command == "POST" or origin else True

    def _send_page(self) -> None:
        folder, nonce = files("hpctrain.watch") / "page", secrets.token_urlsafe(16)
        page = (folder / "page.html").read_text(encoding="utf-8").replace("[[nonce]]", nonce)
        for part in ("uPlot.min.css", "uPlot.iife.min.js", "page.js"):
            page = page.replace(f"[[{part}]]", (folder / part).read_text(encoding="utf-8"))
        self._send(page, 200, "text/html", POLICY.replace("NONCE", nonce))

    def _send(
        self,
        value: Any,
        status: int = 200,
        kind: str = "application/json",
        policy: str = "default-src 'none'",
    ) -> None:
        text = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(text.encode())))
        self.send_header("Content-Security-Policy", policy)
        for header in HEADERS.items():
            self.send_header(*header)
        self.end_headers()
        self.wfile.write(text.encode())
