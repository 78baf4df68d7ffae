"""A local HTTP server of a file, with faults on request."""

import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PIECE = 1 << 16  # bytes


class FaultyServer:
    """Serves `data` under any path. Each GET first takes one fault from `faults`, when there is
    one.

    Faults: an int (break off after so many bytes of the body), "503", "404", "whole" or "stall".
    `sent` counts body bytes, `requests` the Range headers asked for.
    """

    def __init__(self, data):
        self.data = data
        self.faults = []
        self.sent = 0
        self.requests = []
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                outer._get(self)

            def log_message(self, *_):
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.handle_error = lambda *_: None  # these tests are about clients that disconnect
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def close(self):
        self._http.shutdown()
        self._http.server_close()

    def _headers(self, request, code, length, place=None):
        request.send_response(code)
        request.send_header("Content-Length", str(length))
        if place:
            request.send_header("Content-Range", place)
        request.end_headers()

    def _get(self, request):
        with self._lock:
            self.requests.append(request.headers.get("Range"))
            fault = self.faults.pop(0) if self.faults else None
        if fault in ("503", "404"):
            self._headers(request, int(fault), 0)
        elif fault == "whole":  # 200 and the whole file, whatever was asked
            self._headers(request, 200, len(self.data))
            self._send(request, self.data)
        elif fault == "stall":  # headers, and then nothing
            self._headers(request, 206, 1000)
            time.sleep(1.0)
            request.close_connection = True
        else:
            self._serve(request, fault)

    def _serve(self, request, cut):
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("Range") or "")
        start, end = map(int, match.groups())
        body = self.data[start : end + 1]
        place = f"bytes {start}-{start + len(body) - 1}/{len(self.data)}"
        self._headers(request, 206, len(body), place)
        self._send(request, body[:cut])
        if cut is not None and cut < len(body):
            request.close_connection = True

    def _send(self, request, body):
        for at in range(0, len(body), PIECE):
            try:
                request.wfile.write(body[at : at + PIECE])
            except OSError:  # the client has enough
                request.close_connection = True
                return
            with self._lock:
                self.sent += len(body[at : at + PIECE])
