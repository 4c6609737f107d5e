"""Split GGUF files: any part and the folder stand for the whole model, and a missing part is named."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from placement.checkpoint.gguf.split import find_files, read_model
from placement.checkpoint.header import check_tensors, is_safetensors, read, read_tensors
from placement.cost.memory import parameter_count
from placement.model.spec import ModelError, ModelSpec
from serve_app.commands import cli
from serve_app.deployment.catalog import resolve
from serve_app.text.model_files import read_text_files
from tests.support.models.gguf_split import NUM_PARAMETERS, write_split

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """Three files, in a folder of their own."""
    folder = tmp_path / "some-model"
    folder.mkdir()
    found = write_split(folder / "part.gguf", 8)
    assert [file.name for file in found] == [f"part-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    return found


@pytest.fixture
def whole(tmp_path: Path) -> ModelSpec:
    [file] = write_split(tmp_path / "whole.gguf")
    return read(file)


def rename(parts: list[Path], *names: str) -> list[Path]:
    return [part.rename(part.with_name(name)) for part, name in zip(parts, names, strict=True)]


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as refused:
        read(path)
    with pytest.raises(ModelError) as again:
        resolve(str(path))
    assert str(again.value) == str(refused.value)
    return str(refused.value)


def check_whole(path: Path, whole: ModelSpec, first: Path, name: str) -> None:
    assert read(path) == whole
    assert parameter_count(read(path)) == NUM_PARAMETERS
    assert not is_safetensors(path)
    check_tensors(path, whole)
    assert len({entry.file for entry in read_tensors(path, whole).tensors.values()}) == 3
    assert read_text_files(path).tokenizer is None
    found = resolve(str(path), header_only=True)
    assert (found.path, found.name) == (first, name)


def test_any_part_and_the_folder_are_the_model(parts: list[Path], whole: ModelSpec) -> None:
    for part in parts:
        check_whole(part, whole, parts[0], "part")
    check_whole(parts[0].parent, whole, parts[0], "some-model")


@pytest.mark.parametrize(
    "names",
    [
        ("c.gguf", "a.gguf", "b.gguf"),
        ("part-00001-of-00003.gguf", "a.gguf", "part-00003-of-00003.gguf"),
        ("x-00002-of-00003.gguf", "x-00003-of-00003.gguf", "x-00001-of-00003.gguf"),
    ],
)
def test_renamed_parts_are_known_by_their_fields(parts: list[Path], whole: ModelSpec, names: tuple[str, ...]) -> None:
    renamed = rename(parts, *names)
    for path in (*renamed, renamed[0].parent):
        assert find_files(path) == tuple(renamed)
        assert read(path) == whole
        check_tensors(path, whole)


@pytest.mark.parametrize("absent", range(3))
def test_a_missing_part_is_named(parts: list[Path], absent: int) -> None:
    gone = parts.pop(absent)
    gone.unlink()
    for path in (*parts, gone.parent):
        text = refusal(path)
        assert f"there is no part {absent + 1} ({gone.name})" in text
        assert "of 3" in text


def test_a_missing_part_without_a_usual_name_is_numbered(parts: list[Path]) -> None:
    _, second, third = rename(parts, "a.gguf", "b.gguf", "c.gguf")
    second.unlink()
    third.unlink()
    assert refusal(parts[0].with_name("a.gguf")).endswith("there is no part 2, part 3")


def test_a_part_that_is_there_twice(parts: list[Path]) -> None:
    _, second, _ = rename(parts, "a.gguf", "b.gguf", "c.gguf")
    second.with_name("copy.gguf").write_bytes(second.read_bytes())
    text = refusal(parts[0].parent)
    assert all(part in text for part in (str(second), "copy.gguf", "both part 2 of 3"))


def test_a_damaged_part_is_named(parts: list[Path]) -> None:
    parts[2].write_bytes(parts[2].read_bytes()[:-100])
    for path in (*parts, parts[0].parent):
        assert f"{parts[2]} is not a whole GGUF file" in refusal(path)


def test_an_unlike_model_beside_the_parts_is_no_part(parts: list[Path], whole: ModelSpec) -> None:
    [other] = write_split(parts[0].with_name("z.gguf"))
    more = write_split(parts[0].with_name("y.gguf"), 16)
    assert len(more) == 2
    assert {read(path) == whole for path in (*parts, other, *more)} == {True}
    assert find_files(parts[1]) == tuple(parts)
    assert find_files(other) == (other,)
    assert find_files(more[1]) == tuple(more)
    assert "3 models in GGUF files (part-00001-of-00003.gguf, y-00001-of-00002.gguf, z.gguf)" in refusal(parts[0].parent)


def test_two_models_of_one_shape_are_told_apart_by_their_names(parts: list[Path]) -> None:
    more = write_split(parts[0].with_name("other.gguf"), 8)
    assert find_files(parts[1]) == tuple(parts)
    assert find_files(more[1]) == tuple(more)


def test_the_vision_part_of_a_multimodal_model_does_not_count(parts: list[Path]) -> None:
    writer = gguf.GGUFWriter(parts[0].with_name("mmproj.gguf"), "clip")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert find_files(parts[0].parent) == tuple(parts)


def test_parts_with_too_few_tensors(tmp_path: Path) -> None:
    for number, tensors in ((0, ["a"]), (1, ["b"])):
        write_part(tmp_path / f"p{number}.gguf", number, 2, 3, tensors)
    with pytest.raises(ModelError, match=r"split.tensors.count is 3, but the 2 parts have 2 tensors"):
        read_model(tmp_path)


def test_a_tensor_in_two_parts(tmp_path: Path) -> None:
    for number, tensors in ((0, ["a", "b"]), (1, ["b"])):
        write_part(tmp_path / f"p{number}.gguf", number, 2, 3, tensors)
    with pytest.raises(ModelError, match=r"tensor b is in two parts: .*p0.gguf and .*p1.gguf"):
        read_model(tmp_path)


@pytest.mark.parametrize(
    ("number", "count", "message"),
    [(0, 60_000, "split.count is 60000, but must be from 1 to 10000"), (3, 3, "split.no is 3, but must be from 0 to 2")],
)
def test_fields_that_contradict_each_other(tmp_path: Path, number: int, count: int, message: str) -> None:
    write_part(tmp_path / "m.gguf", number, count, 1, ["a"])
    assert message in refusal(tmp_path / "m.gguf")


def write_part(path: Path, number: int, count: int, num_tensors: int, tensors: list[str]) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint16("split.no", number)
    writer.add_uint16("split.count", count)
    writer.add_int32("split.tensors.count", num_tensors)
    for name in tensors:
        writer.add_tensor(name, np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_folder_with_a_config_is_one_of_hugging_face(parts: list[Path]) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 7}
    (parts[0].parent / "config.json").write_text(json.dumps(config))
    assert read(parts[0].parent).hidden_size == 64
    assert is_safetensors(parts[0].parent)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs ``shardwright`` with the given arguments: (exit status, stdout, stderr)."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["shardwright", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return (int(ended.value.code or 0), *capsys.readouterr())

    return run


COMMANDS = (
    ("explain", "--json"),
    ("render", "--target", "serve"),
)


@pytest.mark.parametrize("asked", COMMANDS, ids=lambda asked: asked[0])
def test_commands_take_any_part_for_the_whole(command: Command, parts: list[Path], asked: tuple[str, ...]) -> None:
    [whole] = write_split(parts[0].parents[1] / "whole.gguf")
    verb, *options = asked
    status, expected, _ = command(verb, whole, *options)
    assert status == 0
    for path in (*parts, parts[0].parent):
        status, out, err = command(verb, path, *options)
        assert (status, err) == (0, "")
        if verb == "explain":
            ours, theirs = json.loads(out), json.loads(expected)
            assert ours["model"].pop("name") != theirs["model"].pop("name")
            assert ours == theirs


@pytest.mark.parametrize("asked", [*COMMANDS, ("verify", "--layout", "tp=2"), ("serve",)], ids=lambda asked: asked[0])
def test_commands_name_a_missing_part(command: Command, parts: list[Path], asked: tuple[str, ...]) -> None:
    """Before anything starts: with status 2, and one message."""
    parts[1].unlink()
    verb, *options = asked
    for path in (parts[0], parts[2], parts[0].parent):
        status, out, err = command(verb, path, *options)
        assert (status, out) == (2, "")
        assert err.count("there is no part 2 (part-00002-of-00003.gguf)") == 1
