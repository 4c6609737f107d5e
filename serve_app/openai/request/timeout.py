"""A request's own time limit, given in a header."""

from __future__ import annotations

import math

from starlette.datastructures import Headers, MutableHeaders

from serve_app.openai.request.errors import ApiError

_HEADER = "x-request-timeout-seconds"
_HIDDEN = "x-shardwright-timeout-seconds"


def timeout_of(headers: Headers) -> float | None:
    """Returns the caller's time limit of a request, in seconds, from its header ``x-request-timeout-seconds``, even if
    `hide_timeout` has hidden it; None if there is no such header.

    Raises `ApiError` (400) if the header is not a positive, finite number.
    """
    text = headers.get(_HEADER) or headers.get(_HIDDEN)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ApiError(400, f"{_HEADER}: must be a positive number of seconds", param=_HEADER)
    return seconds


def hide_timeout(headers: MutableHeaders) -> None:
    """Rename the header with the time limit in `headers`, in place, to hide it from Serve's proxy, which would cut the answer
    off without an error when the time is over. `timeout_of` still finds it."""
    text = headers.get(_HEADER)
    if text is not None:
        del headers[_HEADER]
        headers[_HIDDEN] = text
