"""The page for the browser, served on the loopback address of this machine until Ctrl-C.

On a login node every user can reach that address, so each request must carry the token, which is
part of the printed URL only. The Host header is checked (a foreign name that resolves to 127.0.0.1
is refused), a stop must be a POST from the page itself (Origin), and the Content-Security-Policy
lets the page load nothing but its own parts. Three answers and one page need no web framework: the
standard library serves them.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs, urlsplit

from hpctrain.errors import Failure, UsageError
from hpctrain.text import say
from hpctrain.watch.drawing import cells, facts, progress
from hpctrain.watch.runs import WatchedRun, WatchedRuns

ADDRESS = "127.0.0.1"
HOSTS = ("127.0.0.1", "localhost", "::1")
POLL_EVERY = 1.0  # seconds, while a page is open
DIGITS = 5  # significant digits of the values of curves
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
Answer = tuple[int, str, bytes]  # status, content type, body


def serve(runs: WatchedRuns, port: int) -> int:
    """Serve until Ctrl-C. Raises UsageError if the port cannot be used."""
    try:
        server = Server(runs, port)
    except OSError as error:
        raise UsageError(f"--port {port}: {error.strerror}") from error
    port = server.server_address[1]
    try:
        say(f"http://{ADDRESS}:{port}/?token={server.token}")
        say(f"from your own machine, first: ssh -L {port}:{ADDRESS}:{port} {_this_host()}")
        say("Ctrl-C ends the page, not the runs")
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
    return 0


class Server(ThreadingHTTPServer):
    """The HTTP server. It holds the token and the runs, which it reads on request."""

    daemon_threads = True

    def __init__(self, runs: WatchedRuns, port: int = 0) -> None:
        super().__init__((ADDRESS, port), Handler)
        self.token = secrets.token_urlsafe(32)
        self._runs = runs
        self._lock = threading.Lock()
        self._polled = 0.0

    def data(self) -> Any:
        """Return the summaries of all runs."""
        with self._lock:
            if time.monotonic() - self._polled >= POLL_EVERY / 2:
                self._runs.poll()
                self._polled = time.monotonic()
            found = [run.summary() for run in self._runs.all()]
        texts = {"cells": cells, "progress": progress, "facts": facts}
        return {"runs": [run | {name: f(run) for name, f in texts.items()} for run in found]}

    def curves(self, key: int) -> Any:
        """Return the curves of one run; None if there is no such run."""
        with self._lock:
            run = self._runs.get(key)
            return curves(run) if run else None

    def stop(self, key: int) -> str | None:
        """Ask one run to stop. Return a message for the user; None if there is no such run."""
        with self._lock:
            run = self._runs.get(key)
            return run.stop() if run else None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of a connection, such as a browser that closed it."""


class Handler(BaseHTTPRequestHandler):
    """Handles one request."""

    server: Server
    server_version, sys_version = "hpctrain", ""
    timeout = 30  # seconds to wait for a request

    def respond(self) -> None:
        """Send the page, its data or the curves of a run; a POST asks a run to stop."""
        path, _, text = self.path.partition("?")
        query = {name: values[0] for name, values in parse_qs(text).items()}
        nonce = secrets.token_urlsafe(16)
        if not self._is_allowed(query.get("token", ""), self.command == "POST"):
            self._send((403, "text/plain", b"refused: open the address that was printed\n"), nonce)
            return
        match self.command, path:
            case "GET", "/":
                answer = 200, "text/html", _page(nonce)
            case "GET", "/data":
                answer = _json(self.server.data())
            case "GET", "/curves":
                found = self.server.curves(_key(query))
                answer = _json(found, 200 if found else 404)
            case "POST", "/stop":
                answer = self._stop(_key(query))
            case _:
                known = path in ("/", "/data", "/curves", "/stop")
                answer = 405 if known else 404, "text/plain", b"there is nothing here\n"
        self._send(answer, nonce)

    do_GET = do_POST = do_HEAD = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = respond

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because URLs contain the token."""

    def _stop(self, key: int) -> Answer:
        try:
            text = self.server.stop(key)
        except Failure as error:
            return _json({"text": str(error)}, 409)
        return _json({"text": text or "there is no such run"}, 200 if text else 404)

    def _is_allowed(self, token: str, posted: bool) -> bool:
        """Whether a request has the token and comes from this server's own page."""
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        if not hmac.compare_digest(token.encode(), self.server.token.encode()):
            return False
        if _name(f"//{host}") not in HOSTS:
            return False
        if self.headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
            return False
        return origin == f"http://{host}" if posted or origin is not None else True

    def _send(self, answer: Answer, nonce: str) -> None:
        status, kind, body = answer
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        for header in HEADERS.items():
            self.send_header(*header)
        self.send_header("Content-Security-Policy", POLICY.replace("NONCE", nonce))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _page(nonce: str) -> bytes:
    folder = files("hpctrain.watch") / "page"
    page = (folder / "page.html").read_text(encoding="utf-8")
    for part in ("plot.js", "page.js"):
        page = page.replace(f"[[{part}]]", (folder / part).read_text(encoding="utf-8"))
    return page.replace("[[nonce]]", nonce).encode()


def _key(query: Mapping[str, str]) -> int:
    """Return the key of a run; -1, which no run has, if it is not a number."""
    text = query.get("run", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 9 else -1


def _this_host() -> str:
    """Return the fully qualified host name, if it is configured; else the short one."""
    name = socket.getfqdn()
    return socket.gethostname() if name.startswith("localhost") else name


def _name(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def _json(value: Any, status: int = 200) -> Answer:
    return status, "application/json", json.dumps(value, allow_nan=False).encode()


def curves(run: WatchedRun) -> dict[str, Any]:
    """Return the key, the version and the curves of a run.

    "loss" and "accuracy" are objects with a list for "training" and for each split; its items are
    lists of step, mean, minimum and maximum.
    """
    history = run.history
    found = {
        name: {
            split: [
                [round(step), *(float(f"{v:.{DIGITS}g}") for v in values)]
                for step, *values in history.curve(name, split)
            ]
            for split in ("training", *history.evaluated)
        }
        for name in ("loss", "accuracy")
    }
    return {"key": run.key, "version": run.history.version, **found}
