"""Removal of passwords from every text that is printed, stored or sent."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from typing import Any
from urllib.parse import unquote, urlsplit

SECRETS = (
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
)
# The user in front of a server's or a database's name, and the value of `?password=...`
_LOGIN = re.compile(r"\b((?:https?|\w+sql(?:\+\w+)?)://)[^\s'\"<>]*@")
_OPTION = re.compile(r"(?i)([?&;][\w.-]*(?:pass|pwd|secret|token|key|sig)[\w.-]*=)[^\s'\"&;]*")


def redact(text: str) -> str:
    """The text without logins in addresses, and without the secrets in the environment."""
    text = _OPTION.sub(r"\1***", _LOGIN.sub(r"\1", text))
    secrets = [os.environ.get(name, "") for name in SECRETS]
    with contextlib.suppress(ValueError):
        password = urlsplit(os.environ.get("MLFLOW_TRACKING_URI", "")).password or ""
        secrets += [password, unquote(password)]
    for secret in secrets:
        if len(secret) > 3:
            text = text.replace(secret, "***")
    return text


def redact_all(value: Any) -> Any:
    """A JSON value with all its texts redacted."""
    if isinstance(value, dict):
        return {key: redact_all(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_all(inner) for inner in value]
    return redact(value) if isinstance(value, str) else value


def say(text: str) -> None:
    """Print one line to stderr."""
    print(f"tracking: {redact(text)}", file=sys.stderr, flush=True)
