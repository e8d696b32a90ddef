"""The page for the browser, from this machine's loopback alone; Ctrl-C ends it.

On a login node everybody can reach that address, so each request needs the token that only the
printed address holds. The Host is checked (a foreign name that resolves to 127.0.0.1 is refused),
a stop is a POST from the page itself (Origin), and the page may load nothing but its own parts.
The standard library serves it: three answers and one file need no framework.
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
from hpctrain.watch.runs import WatchedRun, WatchedRuns, clean

ADDRESS = "127.0.0.1"
HOSTS = ("127.0.0.1", "localhost", "::1")
POLL_EVERY = 1.0  # seconds, while somebody looks
DIGITS = 5  # of the numbers of curves
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
    """Serve until Ctrl-C. UsageError where the port is taken."""
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
    """Holds the runs and the token; runs are read when somebody asks."""

    daemon_threads = True

    def __init__(self, runs: WatchedRuns, port: int = 0) -> None:
        super().__init__((ADDRESS, port), Handler)
        self.token = secrets.token_urlsafe(32)
        self._runs = runs
        self._lock = threading.Lock()
        self._polled = 0.0

    def data(self) -> Any:
        """Summaries of all runs."""
        with self._lock:
            if time.monotonic() - self._polled >= POLL_EVERY / 2:
                self._runs.poll()
                self._polled = time.monotonic()
            found = [run.summary() for run in self._runs.all()]
        texts = {"cells": cells, "progress": progress, "facts": facts}
        return {"runs": [run | {name: f(run) for name, f in texts.items()} for run in found]}

    def curves(self, key: int) -> Any:
        """The curves of one run; None where there is no such run."""
        with self._lock:
            run = self._runs.get(key)
            return curves(run) if run else None

    def stop(self, key: int) -> str | None:
        """Ask one run to stop; a line for the user, None where there is no such run."""
        with self._lock:
            run = self._runs.get(key)
            return clean(run.stop()) if run else None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that left is no error."""


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: Server
    server_version, sys_version = "hpctrain", ""
    timeout = 30  # seconds that a request may take to arrive

    def respond(self) -> None:
        """The page, its data, the curves of a run; a POST stops one."""
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
        """Nothing is logged: addresses hold the token."""

    def _stop(self, key: int) -> Answer:
        try:
            text = self.server.stop(key)
        except Failure as error:
            return _json({"text": str(error)}, 409)
        return _json({"text": text or "there is no such run"}, 200 if text else 404)

    def _is_allowed(self, token: str, posted: bool) -> bool:
        """Whether the request comes from who was given the address, by a page of ours."""
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
    """The number of a run; -1, which none has, for what is no number."""
    text = query.get("run", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 9 else -1


def _this_host() -> str:
    """Its full name, where the machine knows it."""
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
    """The curves of a run: by name, of "training" and of each split, lists of step, mean, minimum
    and maximum.
    """
    history = run.history
    named = {"training": history.step_curves, **history.split_curves}
    found = {
        name: {
            clean(split): [
                [round(p.step), *(float(f"{v:.{DIGITS}g}") for v in (p.mean, p.min, p.max))]
                for p in by_name[name].points
            ]
            for split, by_name in named.items()
        }
        for name in ("loss", "accuracy")
    }
    return {"key": run.key, "version": run.reader.version, **found}
