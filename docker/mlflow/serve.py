"""Start the MLflow server of docker/compose.yaml from its environment, or ask it for its health
(`--health`).

MLFLOW_ALLOWED_HOSTS  names under which the server may be called; others get 403
POSTGRES_HOST         a PostgreSQL server that replaces the SQLite file in /data. Its password
                      comes from the secret file, without which the server does not start
MLFLOW_ARTIFACTS      the place of the artifacts, /data/artifacts or s3://bucket/folder. Clients
                      reach them through the server
"""

from __future__ import annotations

import os
import sys
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Dict, List

PASSWORD_FILE = "/run/secrets/postgres_password"
HOSTS = "mlflow:5000,localhost:*,127.0.0.1:*"


def store(environment: Dict[str, str], password_file: Path = Path(PASSWORD_FILE)) -> str:
    """Address of the metadata store. Raises SystemExit(2) when a password is needed and missing."""
    host = environment.get("POSTGRES_HOST")
    if not host:
        return environment.get("MLFLOW_BACKEND_STORE_URI") or "sqlite:////data/mlflow.db"
    password = password_file.read_text().strip() if password_file.is_file() else ""
    if not password:
        print(
            f"error: POSTGRES_HOST is set and {password_file} is missing or empty", file=sys.stderr
        )
        raise SystemExit(2)
    user = environment.get("POSTGRES_USER", "mlflow")
    name = environment.get("POSTGRES_DB", "mlflow")
    return f"postgresql://{user}:{urllib.parse.quote(password, safe='')}@{host}:5432/{name}"


def command(environment: Dict[str, str]) -> List[str]:
    """The server's command line; the store's address travels in the environment, where `ps` does
    not show it.
    """
    port = environment.get("MLFLOW_PORT") or "5000"
    words = [
        "mlflow",
        "server",
        "--host",
        "0.0.0.0",
        "--port",
        port,
        "--workers",
        "1",
        "--serve-artifacts",
    ]
    words += ["--artifacts-destination", environment.get("MLFLOW_ARTIFACTS") or "/data/artifacts"]
    return [*words, "--allowed-hosts", environment.get("MLFLOW_ALLOWED_HOSTS") or HOSTS]


def main() -> None:
    if sys.argv[1:] == ["--health"]:
        with urllib.request.urlopen("http://127.0.0.1:5000/health", timeout=4) as answer:
            raise SystemExit(0 if answer.status == 200 else 1)
    os.environ["MLFLOW_BACKEND_STORE_URI"] = store(dict(os.environ))
    words = command(dict(os.environ))
    os.execvp(words[0], words)


if __name__ == "__main__":
    main()
