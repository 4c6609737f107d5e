"""Files that are fetched for a hub id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.utils import filter_repo_objects

from serve_app.deployment.catalog import resolve

READ = [
    "config.json", "generation_config.json", "model.safetensors", "model-00001-of-00002.safetensors",
    "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "chat_template.json", "additional_chat_templates/rag.jinja", "processor_config.json",
]  # fmt: skip
NOT_READ = ["README.md", "pytorch_model.bin", "model.onnx", "model.gguf"]


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of a repository's files that the last download asked for."""
    found: list[str] = []

    def snapshot(model: str, allow_patterns: list[str], **_: Any) -> str:
        found[:] = filter_repo_objects([*READ, *NOT_READ], allow_patterns=allow_patterns)
        return f"/snapshots/{model}"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    return found


def test_every_file_that_is_read_is_fetched(fetched: list[str]) -> None:
    assert resolve("owner/model").path == Path("/snapshots/owner/model")
    assert fetched == READ


def test_headers_only(fetched: list[str]) -> None:
    resolve("owner/model", header_only=True)
    assert {"config.json", "generation_config.json"} <= set(fetched)
    assert not any(name.endswith(".safetensors") for name in fetched)
