"""A reader of the page that `hpctrain watch --web` serves."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import quote

from tests.support.api import web
from tests.support.records import refuse_constant


class Answer(NamedTuple):
    """What the server sends."""

    status: int
    headers: Any
    text: str

    def json(self) -> Any:
        """The text as strict JSON."""
        return json.loads(self.text, parse_constant=refuse_constant)


class Page(NamedTuple):
    """A server, as a browser on its machine sees it."""

    port: int
    token: str
    watched: Any

    def ask(self, path: str, method: str = "GET", token: str | None = None) -> Answer:
        """Send a request with its token, or with another one."""
        token = self.token if token is None else token
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            both = "&" if "?" in path else "?"
            connection.request(method, f"{path}{both}token={token}")
            answer = connection.getresponse()
            return Answer(answer.status, answer.headers, answer.read().decode())

    def runs(self) -> list[dict[str, Any]]:
        """What it says of all runs, after one more look: name, status, text, facts, ..."""
        self.watched.poll()
        return self.ask("/data").json()[1]

    def of_run(self, path: str, run: int, method: str = "GET", token: str | None = None) -> Answer:
        """Its answer on one run, by number."""
        return self.ask(f"{path}?run={quote(list(self.watched.all)[run])}", method, token)

    def curves(self, run: int = 0) -> dict[str, Any]:
        """Its curves of a run: "loss" and "accuracy" -> split -> rows of step, mean."""
        return self.of_run("/curves", run).json()[1]

    def stop(self, run: int = 0) -> str:
        """What it says when its button is pressed."""
        return self.of_run("/stop", run, "POST").json()


@contextlib.contextmanager
def watched(*targets: object) -> Iterator[Page]:
    """The page that `watch TARGETS --web` serves."""
    runs = web.WatchedRuns([str(target) for target in targets], "runs")
    with web.Server(runs) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield Page(server.server_address[1], server.token, runs)
        finally:
            server.shutdown()
            thread.join()
