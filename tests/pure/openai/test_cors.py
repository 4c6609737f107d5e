"""Web pages of other origins: read by those that the operator names, with or without keys, errors and streams too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from serve_app.deployment.settings import ArgumentError, parse_args
from serve_app.openai.api import ApiSettings
from serve_app.routing.backend import BackendRefused

PAGE, OTHER, KEY = "http://localhost:3000", "http://localhost:3001", {"authorization": "Bearer k"}
ALLOW = "access-control-allow-origin"
ROUTES = ["/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/toy", "/tokenize", "/detokenize", "/health"]
ASK = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}


@pytest.fixture
def api(endpoint: Callable[..., Any]) -> Any:
    return endpoint([b"AB"], ApiSettings(api_keys=("k",), allow_origins=(PAGE, "https://b.example")))


@pytest.mark.parametrize("path", [*ROUTES, "/nothing"])
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_preflight_needs_no_key_on_any_route(api: Any, path: str, method: str) -> None:
    answer = await api.client.options(path, headers=ASK | {"access-control-request-method": method})
    assert answer.status_code == 200
    assert answer.headers[ALLOW] == PAGE
    assert method in answer.headers["access-control-allow-methods"]
    assert {"authorization", "content-type"} <= set(answer.headers["access-control-allow-headers"].split(","))
    assert "Origin" in answer.headers["vary"]
    assert len(answer.headers.get_list("x-request-id")) == 1


async def test_headers_that_client_libraries_add_pass_the_preflight(api: Any) -> None:
    own = "x-stainless-os,x-stainless-retry-count,x-request-id,x-request-timeout-seconds,content-encoding"
    answer = await api.client.options("/v1/models", headers=ASK | {"access-control-request-headers": own})
    assert (answer.status_code, answer.headers["access-control-allow-headers"]) == (200, own)


@pytest.mark.parametrize("origin", [PAGE, "https://b.example"])
async def test_every_kind_of_answer_may_be_read(api: Any, endpoint: Callable[..., Any], origin: str) -> None:
    api.backend.script = lambda request: [BackendRefused("engine_busy", "full")] if request.tenant == "busy" else [65]
    for method, path, body, headers, status in (
        ("GET", "/v1/models", None, KEY, 200),
        ("GET", "/v1/models", None, {}, 401),
        ("GET", "/health", None, {}, 200),
        ("GET", "/nothing", None, KEY, 404),
        ("GET", "/v1/completions", None, KEY, 405),
        ("POST", "/v1/completions", {"prompt": "x"}, KEY, 200),
        ("POST", "/v1/completions", {"prompt": "x", "stream": True}, KEY, 200),
        ("POST", "/v1/completions", {"prompt": "x"}, {}, 401),
        ("POST", "/v1/completions", {"prompt": 7}, KEY, 400),
        ("POST", "/v1/completions", {"prompt": "x"}, KEY | {"content-encoding": "zstd"}, 415),
        ("POST", "/v1/completions", {"prompt": "x", "user": "busy"}, KEY, 429),
        ("POST", "/v1/completions", {"prompt": "x", "user": "busy", "stream": True}, KEY, 429),
    ):
        answer: httpx.Response = await api.client.request(method, path, json=body, headers=headers | {"origin": origin})
        assert answer.status_code == status, (path, answer.text)
        assert answer.headers.get_list(ALLOW) == [origin], (path, status)
        assert "retry-after" in answer.headers["access-control-expose-headers"]
        other = await api.client.request(method, path, json=body, headers=headers | {"origin": OTHER})
        assert (other.status_code, ALLOW in other.headers) == (status, False)
        assert (await api.client.request(method, path, json=body, headers=headers)).status_code == status


async def test_a_page_that_is_not_named_gets_no_leave(api: Any) -> None:
    answer = await api.client.options("/v1/models", headers=ASK | {"origin": OTHER})
    assert (answer.status_code, ALLOW in answer.headers) == (400, False)


async def test_all_origins(endpoint: Callable[..., Any]) -> None:
    api = endpoint([b"AB"], ApiSettings(allow_origins=("*",)))
    for origin in (PAGE, "null"):
        assert (await api.client.options("/v1/models", headers=ASK | {"origin": origin})).headers[ALLOW] == "*"
        assert (await api.client.get("/v1/models", headers={"origin": origin})).headers[ALLOW] == "*"


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("keys", [(), ("k",)])
async def test_none_by_default(endpoint: Callable[..., Any], path: str, keys: tuple[str, ...]) -> None:
    api = endpoint([b"AB"], ApiSettings(api_keys=keys))
    answer = await api.client.options(path, headers=ASK)
    assert (answer.status_code, answer.headers["allow"]) == (405, answer.headers["allow"])
    assert answer.headers["allow"] in ("GET", "POST")
    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert ALLOW not in (await api.client.get("/health", headers={"origin": PAGE})).headers


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("http://localhost:3000", "http://localhost:3000"),
        ("HTTPS://Chat.Example", "https://chat.example"),
        ("http://[::1]:8080", "http://[::1]:8080"),
        ("chrome-extension://abcdef", "chrome-extension://abcdef"),
        ("null", "null"),
        ("*", "*"),
    ],
)
def test_origins_as_browsers_write_them(given: str, kept: str) -> None:
    assert parse_args({"allow_origins": [given]}).allow_origins == (kept,)


@pytest.mark.parametrize(
    "given",
    ["", "localhost:3000", "localhost", "http://localhost:3000/", "http://a.example/page", "http://a.example?x", "http://*.a",
     "http://a:80", "https://a:443", "http://a,http://b", "http://u:p@a", "http://", "**"],
)  # fmt: skip
def test_what_no_browser_sends_is_refused(given: str) -> None:
    with pytest.raises(ArgumentError, match=r"allow_origins: .*(an origin is a scheme|leave it out)"):
        parse_args({"allow_origins": [given]})
