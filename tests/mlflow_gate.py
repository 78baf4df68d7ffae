"""MLflow's own server behind a gate that can misbehave."""

import os
import threading
import time
from pathlib import Path


class Gate:
    """MLflow's own REST handlers over a local store, behind a gate that can misbehave.

    mode: "up"; "error" answers 500; "hang" answers nothing; "deaf" does the work and loses the
    reply.
    """

    def __init__(self, uri):
        os.environ["_MLFLOW_SERVER_FILE_STORE"] = uri
        os.environ["_MLFLOW_SERVER_ARTIFACT_ROOT"] = str(
            Path(uri[len("sqlite:///") :]).parent / "served"
        )
        from mlflow.server import app, handlers

        from pipeline.distributed import find_free_port

        handlers._tracking_store = handlers._model_registry_store = None
        self.app = app.wsgi_app if hasattr(app, "wsgi_app") else app
        self.mode = "up"
        self.posts = self.requests = 0
        self.port = find_free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self.server = None

    def __call__(self, environ, start_response):
        self.requests += 1
        self.posts += environ["REQUEST_METHOD"] == "POST"
        mode = self.mode
        while self.mode == "hang":
            time.sleep(0.05)
        if mode == "up":
            return self.app(environ, start_response)
        if mode == "deaf":
            list(self.app(environ, lambda *_args: None))
        start_response("500 Broken", [("Content-Type", "text/plain")])
        return [b"broken on purpose"]

    def start(self, mode="up"):
        import logging

        from werkzeug.serving import WSGIRequestHandler, make_server

        self.mode = mode

        class Once(WSGIRequestHandler):
            protocol_version = "HTTP/1.0"  # a connection that is kept would outlive `stop`

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.server = make_server("127.0.0.1", self.port, self, threaded=True, request_handler=Once)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def stop(self):
        self.mode = "error"  # nothing hangs any longer
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()
            self.server = None
