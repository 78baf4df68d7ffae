"""Measure the cost to a training of a tracking server that accepts connections and never answers.

    python tests/faults/telemetry.py [arguments of pipeline.train]

Prints JSON: `steps`; `loop`, seconds of the training loop, validation and checkpoints included;
`calls` to the run from the training's thread and `recording`, the seconds they took; `thread`,
processor seconds of the uploading thread (nearly all of it is importing MLflow); `opening` and
`closing`, seconds before the first and after the last step.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Dict, Sequence

ROOT = Path(__file__).resolve().parents[2]
RECORDED_BY = ("log", "artifact", "dataset", "model", "tags")


class Silent:
    """A server on a free port that accepts every connection and never answers."""

    def __init__(self, port: int = 0) -> None:
        self.listener = socket.create_server(("127.0.0.1", port))
        self.uri = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.taken: list = []
        threading.Thread(target=self._take, daemon=True).start()

    def _take(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                self.taken.append(self.listener.accept()[0])

    def close(self) -> None:
        # Close alone leaves the thread, and so the port, in accept
        self.listener.shutdown(socket.SHUT_RDWR)
        for each in (self.listener, *self.taken):
            each.close()


class Gate:
    """MLflow's own REST handlers over a local store, behind a gate that can misbehave.

    mode: "up"; "error" answers 500; "hang" answers nothing; "deaf" does the work and loses the
    reply. Each answer takes `delay` seconds more.
    """

    def __init__(self, uri: str, port: int = 0, delay: float = 0.0) -> None:
        os.environ["_MLFLOW_SERVER_FILE_STORE"] = uri
        os.environ["_MLFLOW_SERVER_ARTIFACT_ROOT"] = str(
            Path(uri[len("sqlite:///") :]).parent / "served"
        )
        from mlflow.server import app, handlers

        from pipeline.launch import free_port

        handlers._tracking_store = handlers._model_registry_store = None
        self.app = app.wsgi_app if hasattr(app, "wsgi_app") else app
        self.mode = "up"
        self.posts = self.requests = 0
        self.port = port or free_port()
        self.delay = delay
        self.uri = f"http://127.0.0.1:{self.port}"
        self.server = None

    def __call__(self, environ, start_response):
        self.requests += 1
        self.posts += environ["REQUEST_METHOD"] == "POST"
        time.sleep(self.delay)
        mode = self.mode
        while self.mode == "hang":
            time.sleep(0.05)
        if mode in ("error", "hang"):
            return self._fail(start_response)
        if mode == "deaf":
            list(self.app(environ, lambda *_args: None))
            return self._fail(start_response)
        return self.app(environ, start_response)

    @staticmethod
    def _fail(start_response):
        start_response("500 Broken", [("Content-Type", "text/plain")])
        return [b"broken on purpose"]

    def start(self) -> None:
        import logging

        from werkzeug.serving import WSGIRequestHandler, make_server

        self.mode = "up"

        class Once(WSGIRequestHandler):
            protocol_version = "HTTP/1.0"  # a connection that is kept would outlive `stop`

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.server = make_server("127.0.0.1", self.port, self, threaded=True, request_handler=Once)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self.mode = "error"  # nothing hangs any longer
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()
            self.server = None


class Stopwatch:
    """Adds up the seconds of calls from the main thread, by name."""

    def __init__(self) -> None:
        self.seconds: Dict[str, float] = {}
        self.calls: Dict[str, int] = {}

    def around(self, owner: object, method: str, name: str) -> None:
        """Replace `owner.method` by itself, timed."""
        inner = getattr(owner, method)

        def timed(*arguments, **named):
            begun = time.perf_counter()
            try:
                return inner(*arguments, **named)
            finally:
                if threading.current_thread() is threading.main_thread():
                    self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begun
                    self.calls[name] = self.calls.get(name, 0) + 1

        setattr(owner, method, timed)


def measure(arguments: Sequence[str]) -> Dict[str, float]:
    """Train in this process, against a server that hangs."""
    from pipeline import tracking
    from pipeline.tracking import run
    from pipeline.train import __main__ as train
    from pipeline.train.trainer import Training

    silent = Silent()
    watch = Stopwatch()
    thread = {}
    os.environ["MLFLOW_TRACKING_URI"] = silent.uri
    for method in RECORDED_BY:
        watch.around(run.Run, method, "recording")
    closing = run.Run.close

    def close(self, *given):
        clock = time.pthread_getcpuclockid(self._sender.ident)
        thread["seconds"] = time.clock_gettime(clock)
        return closing(self, *given)

    run.Run.close = close
    watch.around(run.Run, "close", "closing")
    watch.around(tracking, "open_run", "opening")
    watch.around(Training, "_loop", "loop")
    watch.around(Training, "_step", "step")
    code = train.main(list(arguments))
    if code or not silent.taken:
        raise SystemExit(
            f"the training ended with {code}, {len(silent.taken)} connections were taken"
        )
    return {
        "steps": watch.calls["step"],
        "calls": watch.calls["recording"],
        "thread": thread["seconds"],
        **{name: watch.seconds[name] for name in ("loop", "recording", "opening", "closing")},
    }


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT)]
    found = measure(sys.argv[1:])
    print(json.dumps(found))
