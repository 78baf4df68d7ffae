"""A local HTTP server of a file, with faults on request."""

import hashlib
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PIECE = 1 << 16  # bytes


class FaultyServer:
    """Serves `data` under any path. Each GET first takes one fault from `faults`, when there is
    one.

    Faults: an int (break off after so many bytes of the body), or the name of a method `fault_...`.
    `sent` counts body bytes, `requests` the Range headers asked for, `cuts` the bodies broken off.
    """

    def __init__(self, data, ranges=True):
        self.data = data
        self.ranges = ranges
        self.faults = []
        self.pace = 0.0  # seconds between two pieces
        self.sent = self.cuts = 0
        self.requests = []
        self.etag = f'"{hashlib.md5(data).hexdigest()}"'
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

    def _headers(self, request, code, length, **more):
        request.send_response(code)
        request.send_header("Content-Length", str(length))
        request.send_header("ETag", self.etag)
        if self.ranges:
            request.send_header("Accept-Ranges", "bytes")
        for name, value in more.items():
            request.send_header(name.replace("_", "-"), value)
        request.end_headers()

    def _get(self, request):
        with self._lock:
            self.requests.append(request.headers.get("Range"))
            fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, str):
            getattr(self, f"fault_{fault}")(request)
        else:
            self._serve(request, fault)

    def _span(self, request):
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range") or "")
        same = request.headers.get("If-Range", self.etag) == self.etag
        if not wanted or not self.ranges or not same:
            return 200, 0, len(self.data)
        start = int(wanted.group(1))
        end = min(int(wanted.group(2)) + 1 if wanted.group(2) else len(self.data), len(self.data))
        return (206, start, end) if start < len(self.data) else (416, 0, 0)

    def _serve(self, request, cut):
        code, start, end = self._span(request)
        more = {}
        if code == 206:
            more["Content_Range"] = f"bytes {start}-{end - 1}/{len(self.data)}"
        self._headers(request, code, end - start, **more)
        body = self.data[start:end]
        whole = cut is None or cut >= len(body)
        self._send(request, body if whole else body[:cut])
        if not whole:
            request.close_connection = True
            with self._lock:
                self.cuts += 1

    def _send(self, request, body):
        for at in range(0, len(body), PIECE):
            piece = body[at : at + PIECE]
            try:
                request.wfile.write(piece)
            except OSError:
                request.close_connection = True
                return
            with self._lock:
                self.sent += len(piece)
            time.sleep(self.pace)

    # --- faults

    def fault_503(self, request):
        self._headers(request, 503, 0, Retry_After="1")

    def fault_416(self, request):
        self._headers(request, 416, 0, Content_Range=f"bytes */{len(self.data)}")

    def fault_404(self, request):
        self._headers(request, 404, 0)

    def fault_new_etag(self, request):
        """The same file under another ETag, from here on; breaks off."""
        self.etag = f'"{len(self.requests)}"'
        self._serve(request, 1000)

    def fault_whole(self, request):
        """200 and the whole file, whatever was asked."""
        self._headers(request, 200, len(self.data))
        self._send(request, self.data)

    def fault_short_length(self, request):
        """A Content-Length that lies, by half, and a body as short."""
        _, start, end = self._span(request)
        half = (end - start) // 2
        self._headers(
            request, 200 if start == 0 else 206, half, Content_Range=f"bytes {start}-{end}/{half}"
        )
        self._send(request, self.data[start : start + half])
