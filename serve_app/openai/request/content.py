"""What the headers of a request say of its body: the media type, which must be JSON, and the compression, which is undone."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from email.message import Message
from typing import Protocol

from starlette.datastructures import Headers

from serve_app.openai.request.errors import ApiError

_CODINGS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
"""The compressions that are read, with the window bits by which zlib knows their formats."""
_ACCEPTED = "gzip, deflate"
_PIECE = 1 << 20
"""Bytes that are decompressed at a time at most."""


class Decompressor(Protocol):
    """Undoes the compression of one body, part by part."""

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """Yields the decompressed bytes of the next part of the body, a limited number at a time. Raises `ApiError` (400) for
        bytes that are not in the format of the compression."""

    def finish(self) -> None:
        """Check that the body was complete. Raises `ApiError` (400) if it was cut short."""


def decompressor(headers: Headers) -> Decompressor:
    """Returns the decompressor for a body with these `headers` of its request.

    Raises `ApiError` (415) if the media type is not JSON in UTF-8, or if the body is compressed in another way than those of
    `_CODINGS`. A missing media type is not accepted either: a web page can send such a request, like one of ``text/plain``, to
    any server without a preflight, so that the rules for other origins would not protect this one.
    """
    _check_media_type(headers.get("content-type", ""))
    given = ",".join(headers.getlist("content-encoding")).lower().split(",")
    codings = [coding for each in given if (coding := each.strip()) not in ("", "identity")]
    if not codings:
        return _Plain()
    if len(codings) > 1 or codings[0] not in _CODINGS:
        raise ApiError(
            415,
            f"The body's Content-Encoding is not supported: one of {_ACCEPTED} or identity is.",
            param="content-encoding",
            code="unsupported_content_encoding",
            headers={"accept-encoding": _ACCEPTED},
        )
    return _Compressed(codings[0])


def _check_media_type(given: str) -> None:
    message = Message()
    message["content-type"] = given
    kind, charset = message.get_content_type(), str(message.get_content_charset("utf-8")).replace("_", "-")
    is_json = kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
    if not given or not is_json or charset not in ("utf-8", "utf8", "us-ascii"):
        raise ApiError(
            415, "The body must be JSON in UTF-8, and say so: send the header Content-Type: application/json.",
            param="content-type", code="unsupported_media_type",
        )  # fmt: skip


class _Plain:
    """A body that is not compressed."""

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """See `Decompressor.pieces`. Yields `data` itself."""
        yield data

    def finish(self) -> None:
        """See `Decompressor.finish`. Such a body tells its own end."""


class _Compressed:
    """A body in one of `_CODINGS`. A gzip body may have several members, one after the other."""

    def __init__(self, coding: str) -> None:
        self._coding, self._wbits = coding, _CODINGS[coding]
        self._inner = zlib.decompressobj(self._wbits)

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """See `Decompressor.pieces`."""
        is_full = False
        while data or is_full:
            if self._inner.eof:
                self._begin_next()
            try:
                piece = self._inner.decompress(data, _PIECE)
            except zlib.error:
                raise self._wrong(f"is not {self._coding}, as its Content-Encoding says") from None
            data = self._inner.unconsumed_tail or self._inner.unused_data
            is_full = len(piece) == _PIECE and not self._inner.eof  # zlib may hold back more, though it has read all
            if piece:
                yield piece

    def finish(self) -> None:
        """See `Decompressor.finish`."""
        if not self._inner.eof:
            raise self._wrong(f"is cut short: its {self._coding} data has no end")

    def _begin_next(self) -> None:
        if self._coding == "deflate":
            raise self._wrong("goes on after the end of its deflate data")
        self._inner = zlib.decompressobj(self._wbits)

    def _wrong(self, what: str) -> ApiError:
        return ApiError(400, f"The body {what}.", param="content-encoding", code="invalid_body")
