"""Answers as bytes: JSON that no line reader breaks, and server-sent events."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response

_LINE_BREAKS = {breaker: f"\\u{ord(breaker):04x}" for breaker in "\x85\u2028\u2029"}
"""Characters at which many line readers break (`str.splitlines` and what is built on it), and their escapes. The others,
such as form feed, are control characters, which JSON always escapes."""


def dumps(value: Any) -> bytes:
    """Returns `value` as strict, compact JSON in UTF-8, on one line for every line reader: in no character does
    `str.splitlines` find a line end. Raises `ValueError` for NaN or infinity, and `TypeError` for a value that JSON does not
    have."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    if not text.isascii():
        for breaker, escape in _LINE_BREAKS.items():  # they can only be inside of strings
            text = text.replace(breaker, escape)
    return text.encode()


def sse(value: dict[str, Any]) -> bytes:
    """Returns one server-sent event (``data: ...`` and an empty line) with `value` as JSON. Raises `ValueError` for NaN or
    infinity."""
    return b"data: " + dumps(value) + b"\n\n"


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Returns an HTTP response with `value` as its JSON body. Raises `ValueError` for NaN or infinity."""
    return Response(dumps(value), status, headers, media_type="application/json")
