"""A request's body as a Python object: strict JSON, decompressed, bounded in size."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any, NoReturn

from starlette.requests import Request

from serve_app.openai.request import content
from serve_app.openai.request.errors import ApiError

_GZIP_MAGIC = b"\x1f\x8b"


async def read_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """Returns the JSON object in the body of `request`. Fields that are null are left out.

    Raises `ApiError`: 415 if it is not sent as JSON, or is compressed in an unknown way (see `content.decompressor`); 400 if
    the body is larger than `max_bytes`, compressed or decompressed, or is not a strict JSON object (see `parse`).
    """
    value = parse(await _read(request, max_bytes))
    if not isinstance(value, dict):
        raise _bad("The body must be a JSON object.")
    return {key: item for key, item in value.items() if item is not None}


def parse(data: bytes) -> Any:
    """Returns the JSON value in `data`, as plain Python values.

    Raises `ApiError` (400) if it is not UTF-8 or not valid JSON, is nested too deeply, or contains NaN, an infinity (also a
    number too large for a float) or an unpaired surrogate.
    """
    try:
        value = json.loads(data.decode(), parse_constant=_constant, parse_float=_finite)
        if b"\\u" in data:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        if data.startswith(_GZIP_MAGIC):
            raise _bad("The body is compressed: send the header Content-Encoding: gzip with it.") from None
        raise _bad(f"The body is not UTF-8: byte {error.start} is wrong.") from None
    except UnicodeEncodeError:
        raise _bad("The body has a text with half a surrogate pair (\\ud800 to \\udfff), which is no character.") from None
    except RecursionError:
        raise _bad("The body is nested too deeply.") from None
    except ValueError as error:
        where = f" at line {error.lineno}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise _bad(f"The body is not valid JSON{where}.") from None
    return value


async def _read(request: Request, max_bytes: int) -> bytes:
    """Read and decompress the body. Raises `ApiError` as soon as it is too large, so that never more than the limit is held."""
    decompressor = content.decompressor(request.headers)
    parts, size, received = [], 0, 0
    async for data in request.stream():
        received += len(data)
        if received > max_bytes:
            raise _bad(f"The body is larger than {max_bytes} bytes.")
        for part in decompressor.pieces(data):
            size += len(part)
            if size > max_bytes:
                raise _bad(f"The body is larger than {max_bytes} bytes when it is decompressed.")
            parts.append(part)
            await asyncio.sleep(0)  # a small part may become a large one, and other requests are to be served meanwhile
    decompressor.finish()
    return b"".join(parts)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large for a float")
    return value


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _bad(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_body")
