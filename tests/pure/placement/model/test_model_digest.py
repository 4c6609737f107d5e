"""What changes a model's digest, and what does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from placement.model.digest import model_digest
from tests.support.kv.handoff_cases import heads_model

SIZE = 3_000_000


def _weights(folder: Path, content: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(content)
    return folder


def test_it_is_the_same_for_the_same_model_wherever_it_lies(tmp_path: Path) -> None:
    content = bytes(range(250)) * (SIZE // 250)
    one, two = (_weights(tmp_path / name, content) for name in ("one", "two"))
    assert model_digest(heads_model(2), one) == model_digest(heads_model(2), two)
    assert model_digest(heads_model(2), one / "model.safetensors") == model_digest(heads_model(2), one)
    assert len(model_digest(heads_model(2), one)) == 64


def test_other_sizes_other_weights_and_other_lengths_are_other_models(tmp_path: Path) -> None:
    content = bytes(range(250)) * (SIZE // 250)
    folder = _weights(tmp_path / "it", content)
    digests = {model_digest(heads_model(2), folder), model_digest(heads_model(3), folder)}
    for changed in (b"x" + content[1:], content[:-1] + b"x", content[:-1], bytes(byte ^ 1 for byte in content)):
        digests.add(model_digest(heads_model(2), _weights(folder, changed)))
    assert len(digests) == 6


def test_a_change_to_every_weight_after_the_header_is_seen(tmp_path: Path) -> None:
    """As another training of the same architecture: headers and lengths are equal."""
    header, rest = bytes(1 << 19), bytes(SIZE)
    first = model_digest(heads_model(2), _weights(tmp_path / "it", header + rest))
    second = model_digest(heads_model(2), _weights(tmp_path / "it", header + bytes([1]) * SIZE))
    assert first != second


def test_a_folder_without_weights_has_no_digest(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there are no weights"):
        model_digest(heads_model(2), tmp_path)
