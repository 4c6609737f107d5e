"""Tensor directories: what headers say of a checkpoint's tensors, and every way in which they can be wrong."""

from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize

from placement.checkpoint.header import check_tensors, read_tensors
from placement.checkpoint.hf import config_json
from placement.checkpoint.hf.safetensors_file import AbsentWeights, read_directory
from placement.model.spec import ModelError, ModelSpec
from tests.support.models.safetensors_files import as_bytes, header_of, tensors_of, write

TWO = {"a": ("F32", (2, 3)), "b": ("BF16", (4,))}
"""24 and 8 bytes."""

CONFIG = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 11,
    "max_position_embeddings": 64,
    "torch_dtype": "float32",
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


@pytest.fixture
def model(tmp_path: Path) -> tuple[Path, ModelSpec]:
    """(folder of a sound model in one file, what it is)."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    spec = config_json.read(tmp_path)
    write(tmp_path / "model.safetensors", tensors_of(spec))
    return tmp_path, spec


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as refused:
        read_directory(path)
    return str(refused.value)


def said_of(file: Path, data: bytes) -> str:
    """What is said of a file of these bytes; the file must be named."""
    file.write_bytes(data)
    message = refusal(file)
    assert message.startswith(f"{file}: damaged or incomplete safetensors file (")
    return message


def changed(name: str, **fields: Any) -> bytes:
    """The file of `TWO`, with fields of one entry of its header changed."""
    header = header_of(TWO)
    header[name] |= fields
    return as_bytes(header, 32)


def test_entries_say_where_a_tensor_is_and_its_shape(file: Path) -> None:
    directory = read_directory(write(file, TWO))
    assert {name: (each.file, each.stored_name, each.shape, each.unreadable) for name, each in directory.tensors.items()} == {
        "a": (file, "a", (2, 3), None),
        "b": (file, "b", (4,), None),
    }
    content = file.read_bytes()
    assert {name: (each.dtype, each.data) for name, each in directory.tensors.items()} == {
        "a": ("F32", range(len(content) - 32, len(content) - 8)),
        "b": ("BF16", range(len(content) - 8, len(content))),
    }
    assert directory.location == file


def test_entries_need_not_stand_in_the_order_of_their_data(file: Path) -> None:
    header = header_of(TWO)
    file.write_bytes(as_bytes(dict(reversed(header.items())), 32))
    assert set(read_directory(file).tensors) == {"a", "b"}


def test_empty_tensors_and_scalars_are_known(file: Path) -> None:
    directory = read_directory(write(file, {"none": ("F32", (0, 4)), "one": ("F32", ())}))
    assert {name: each.shape for name, each in directory.tensors.items()} == {"none": (0, 4), "one": ()}


def test_a_file_cut_at_any_byte_is_refused(file: Path) -> None:
    whole = write(file, TWO).read_bytes()
    for cut in range(len(whole)):
        assert said_of(file, whole[:cut])


@pytest.mark.parametrize(
    ("cut", "said"),
    [
        (0, "it has 0 bytes, fewer than the 8 that say how long its header is"),
        (7, "it has 7 bytes"),
        (8, "bytes long, but 0 follow"),
        (60, "bytes long, but 52 follow"),
        (-1, "it ends 1 bytes too early"),
        (-32, "it ends 32 bytes too early"),
    ],
)
def test_what_a_cut_file_lacks_is_said(file: Path, cut: int, said: str) -> None:
    assert said in said_of(file, write(file, TWO).read_bytes()[:cut])


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (as_bytes(header_of(TWO), 33), "1 bytes follow the last tensor's data"),
        (
            changed("b", data_offsets=[16, 24]),
            "the data of tensor b is said to begin at 16, but the tensors before it end at 24",
        ),
        (changed("b", data_offsets=[25, 33]), "the data of tensor b is said to begin at 25"),
        (changed("a", data_offsets=[24, 0]), "the data of tensor a is said to begin at 24, but the tensors before it end at 0"),
        (changed("a", shape=[2, 4]), "tensor a is said to have 24 bytes, which is not F32 of shape [2, 4]"),
        (changed("a", shape=[2**62, 2**62]), "tensor a is said to have 24 bytes"),
        (changed("a", shape=[-2, -3]), "a shape 0: Input should be greater than or equal to 0"),
        (changed("a", shape=[2.0, 3]), "a shape 0: Input should be a valid integer"),
        (changed("a", shape=[True, 6]), "a shape 0: Input should be a valid integer"),
        (changed("a", shape=None), "a shape: "),
        (changed("a", dtype="F33"), "tensor a has the unknown type 'F33'"),
        (changed("a", dtype=7), "a dtype: Input should be a valid string"),
        (changed("a", data_offsets=[0]), "a data_offsets"),
        (changed("a", data_offsets=["0", "24"]), "a data_offsets 0: Input should be a valid integer"),
        (as_bytes({"a": 1}, 0), "in its header, a: "),
        (as_bytes({"a": {}}, 0), "in its header, a dtype: Field required"),
        (as_bytes({"__metadata__": {"n": 1}}, 0), "in its header, n: Input should be a valid string"),
        (as_bytes(b"", 0), "its header is not JSON"),
        (as_bytes(b"{]", 0), "its header is not JSON"),
        (as_bytes(b"\xff\xfe{}", 0), "its header is not JSON"),
        (as_bytes("{}".encode("utf-16"), 0), "its header is not JSON"),
        (as_bytes(b"[" * 100_000, 0), "its header is not JSON"),
        (as_bytes(b"[]", 0), "its header is not a table of tensors"),
        (as_bytes(b"null", 0), "its header is not a table of tensors"),
        (as_bytes(b'{"a": 1, "a": 2}', 0), "a is twice in its header"),
        (struct.pack("<Q", 2**60) + b"{}", f"its header is said to be {2**60} bytes long, but 2 follow"),
        (struct.pack("<Q", 2**64 - 1) + b"{}", f"its header is said to be {2**64 - 1} bytes long, but 2 follow"),
    ],
)
def test_what_is_wrong_with_a_header_is_said(file: Path, data: bytes, said: str) -> None:
    assert said in said_of(file, data)


def test_a_header_longer_than_the_format_allows_is_not_read(file: Path) -> None:
    with file.open("wb") as out:
        out.write(struct.pack("<Q", 200_000_000))
        out.truncate(200_000_008)  # no byte of it is on the disk
    assert "may be 100000000 at most" in refusal(file)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=3))
def test_whatever_the_library_refuses_of_a_damaged_header_is_refused(file: Path, changes: list[tuple[float, int]]) -> None:
    data = bytearray(write(file, TWO).read_bytes())
    for place, value in changes:
        data[int(place * (len(data) - 32))] = value
    file.write_bytes(data)
    refused = False
    try:
        read_directory(file)
    except ModelError:
        refused = True
    with contextlib.suppress(SafetensorError):
        deserialize(bytes(data))
        return
    assert refused


def index(folder: Path, **weight_map: str) -> Path:
    file = folder / "model.safetensors.index.json"
    file.write_text(json.dumps({"weight_map": weight_map}))
    return file


def test_an_index_names_the_files(tmp_path: Path) -> None:
    for name, each in TWO.items():
        write(tmp_path / f"{name}.safetensors", {name: each})
    index(tmp_path, a="a.safetensors", b="b.safetensors")
    files = {name: each.file.name for name, each in read_directory(tmp_path).tensors.items()}
    assert files == {"a": "a.safetensors", "b": "b.safetensors"}


def test_the_index_settles_which_of_two_files_counts(tmp_path: Path) -> None:
    other = {"a": ("F32", (3, 2)), "b": ("F16", (4,))}
    write(tmp_path / "one.safetensors", TWO)
    write(tmp_path / "two.safetensors", other)
    for first, second in (("one", "two"), ("two", "one"), ("two", "two")):
        index(tmp_path, a=f"{first}.safetensors", b=f"{second}.safetensors")
        found = read_directory(tmp_path).tensors
        assert {name: each.file.stem for name, each in found.items()} == {"a": first, "b": second}
        assert found["a"].shape == {"one": (2, 3), "two": (3, 2)}[first]
        assert found["b"].dtype == {"one": "BF16", "two": "F16"}[second]


def test_a_copy_that_the_index_leaves_open_names_all_files(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write(tmp_path / f"{name}.safetensors", TWO | {name: ("F32", (1,))})
    named = index(tmp_path, one="one.safetensors", two="two.safetensors", b="two.safetensors")
    files = f"{tmp_path}/one.safetensors and {tmp_path}/two.safetensors"
    assert refusal(tmp_path) == f"tensor a is in 2 files, {files}, and {named} does not say which counts"


def test_an_index_that_names_the_wrong_file_is_refused(tmp_path: Path) -> None:
    """The other file's copy may be the one that was to be replaced."""
    write(tmp_path / "one.safetensors", TWO)
    write(tmp_path / "two.safetensors", {"b": TWO["b"]})
    named = index(tmp_path, a="two.safetensors", b="one.safetensors")
    assert refusal(tmp_path) == f"{named}: tensor a is said to be in two.safetensors, but it is only in one.safetensors"


def test_a_tensor_that_the_index_does_not_list_is_known_from_the_only_file_that_has_it(tmp_path: Path) -> None:
    write(tmp_path / "one.safetensors", TWO)
    index(tmp_path, a="one.safetensors")
    assert set(read_directory(tmp_path).tensors) == {"a", "b"}


def test_a_file_that_lacks_what_the_index_names_is_named(model: tuple[Path, ModelSpec]) -> None:
    folder, spec = model
    tensors = tensors_of(spec)
    (folder / "model.safetensors").unlink()
    write(folder / "one.safetensors", {name: each for name, each in tensors.items() if name != O_PROJ})
    write(folder / "two.safetensors", {"model.layers.0.self_attn.rotary_emb.inv_freq": ("F32", (2,))})
    index(folder, **(dict.fromkeys(tensors, "one.safetensors") | {O_PROJ: "two.safetensors", "unused": "two.safetensors"}))
    with pytest.raises(ModelError) as refused:
        check_tensors(folder, spec)
    missing = f"1 tensors of layers 0-2 (the only stage) are missing: {O_PROJ}"
    named = f"The index names two.safetensors for {O_PROJ}, but that file does not have it"
    assert str(refused.value) == f"{folder}: {missing}. {named}"


def test_weights_that_are_absent_are_told_from_damaged_ones(tmp_path: Path) -> None:
    with pytest.raises(AbsentWeights, match=r"no weights; looked for model\.safetensors and"):
        read_directory(tmp_path)
    write(tmp_path / "a.safetensors", TWO)
    named = index(tmp_path, a="a.safetensors", c="c.safetensors")
    with pytest.raises(AbsentWeights, match=r"1 of 2 files it names are not there: c\.safetensors") as absent:
        read_directory(tmp_path)
    assert str(named) in str(absent.value)


def test_a_sound_model_passes(model: tuple[Path, ModelSpec]) -> None:
    folder, spec = model
    check_tensors(folder, spec)
    write(folder / "model.safetensors", tensors_of(spec, "BF16"))
    check_tensors(folder / "model.safetensors", spec)
    assert set(read_tensors(folder, spec).tensors) == set(tensors_of(spec))


O_PROJ = "model.layers.1.self_attn.o_proj.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({O_PROJ: None}, f"1 tensors of layers 0-2 (the only stage) are missing: {O_PROJ}"),
        ({"surplus": ("F32", (2,))}, "1 tensors that a llama model with these settings has no place for: surplus"),
        ({O_PROJ: ("F32", (16, 8))}, f"tensor {O_PROJ} has shape [16, 8], but the model's settings make it [16, 16]"),
        (
            {O_PROJ: ("I8", (16, 16))},
            f"tensor {O_PROJ} has type I8, which cannot be read; readable types are BF16, F16, F32, F64",
        ),
        ({"lm_head.weight": None}, "missing: lm_head.weight"),
    ],
)
def test_tensors_that_are_not_the_models_are_named(
    model: tuple[Path, ModelSpec], change: dict[str, tuple[str, tuple[int, ...]] | None], said: str
) -> None:
    folder, spec = model
    tensors = {name: each for name, each in (tensors_of(spec) | change).items() if each is not None}
    write(folder / "model.safetensors", tensors)
    with pytest.raises(ModelError) as refused:
        check_tensors(folder, spec)
    assert said in str(refused.value)
    assert str(folder) in str(refused.value)
