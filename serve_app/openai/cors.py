"""Cross-origin resource sharing (CORS): which web pages may use the endpoint, and the headers that tell their browsers so."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from serve_app.openai.request.request_id import HEADER


def add_cors(app: FastAPI, allow_origins: Sequence[str]) -> None:
    """Let web pages of `allow_origins` (as browsers write them; ``*`` for all) use every route of `app`.

    Preflight requests are answered before any key is asked for, since browsers send none with them. All other answers to such
    pages, errors and streams included, carry the header that lets the page read them.
    """
    app.add_middleware(
        CORSMiddleware,
        allow_origins=allow_origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=(HEADER, "retry-after"),
        allow_private_network=True,
    )
