"""The one error a person is meant to read."""

from __future__ import annotations


class RequestError(Exception):
    """The request was wrong: a missing file, a misspelt key, a value out of range.

    The message is one line that names the file or key and the mend. Commands end with exit code 2
    and this line on stderr, without a traceback.
    """
