"""A server that answers POST requests, for tests of clients."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextmanager
def serve_posts(answer: Callable[[str, Mapping[str, str], bytes], tuple[int, bytes]]) -> Iterator[str]:
    """Serve on loopback; yield the address. answer: takes path, headers and body, and returns status and body."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            given = self.rfile.read(int(self.headers["Content-Length"]))
            status, body = answer(self.path, self.headers, given)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *what: Any) -> None:
            pass

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{made.server_address[1]}"
    finally:
        made.shutdown()
        made.server_close()
