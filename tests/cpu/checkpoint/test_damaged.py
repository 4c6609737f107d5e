"""Damaged checkpoints: whatever was cut or overwritten, the answer is one `ModelError` that names the file, or a load."""

from __future__ import annotations

import resource
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from placement.checkpoint.gguf.gguf_file import read_header
from placement.layout.layout import Layout
from placement.model.spec import ModelError
from tests.support.models.checkpoint_checks import llama_spec, load_rank, random_model, stored
from tests.support.models.gguf_files import write_gguf

torch.set_num_threads(1)

SPEC = llama_spec(num_layers=1)


@pytest.fixture(scope="module", params=["model.safetensors", "model.gguf"])
def good(request, tmp_path_factory) -> tuple[bytes, int, Path]:
    """(bytes of a sound file, where its tensor data begins, a path for damaged copies)."""
    folder = tmp_path_factory.mktemp("damaged")
    path = folder / request.param
    weights = {name: x for name, x in stored(random_model("llama"), SPEC).items() if ".1." not in name and ".2." not in name}
    if path.suffix == ".gguf":
        write_gguf(path, weights, SPEC, "Q8_0")
        start = read_header(path).data_start
    else:
        save_file(weights, path)
        start = 8 + struct.unpack("<Q", path.read_bytes()[:8])[0]
    load_rank(path, SPEC, Layout(), 0)
    return path.read_bytes(), start, path


def refused_or_loaded(path: Path, data: bytes) -> bool:
    """Whether a damaged copy was refused; any other error fails the test."""
    path.write_bytes(data)
    try:
        load_rank(path, SPEC, Layout(), 0)
    except ModelError as error:
        message = str(error)
    else:
        return False
    assert str(path) in message
    return True


def _peak_bytes() -> int:
    """The most memory this process has had so far."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_a_file_cut_anywhere_is_refused(good):
    data, start, path = good
    cuts = {*range(0, 40), *range(40, start, 37), start - 1, start, start + 1, len(data) // 2, len(data) - 33}
    for cut in cuts:
        assert refused_or_loaded(path, data[:cut]), f"cut at {cut} of {len(data)}"


def test_the_message_says_what_an_incomplete_file_lacks(good):
    data, _, path = good
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelError, match=r"damaged or incomplete|not a whole GGUF file"):
        load_rank(path, SPEC, Layout(), 0)


@settings(max_examples=300, deadline=20_000)
@given(changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4))
def test_bytes_overwritten_in_the_header_never_crash(good, changes):
    data, start, path = good
    damaged = bytearray(data)
    for place, value in changes:
        damaged[int(place * start)] = value
    refused = refused_or_loaded(path, bytes(damaged))
    assert not refused or bytes(damaged) != data


@settings(max_examples=150, deadline=20_000)
@given(place=st.floats(0, 1, exclude_max=True), value=st.sampled_from([2**63, 2**64 - 1, 2**62, 2**32, 2**31, 10**6]))
def test_huge_numbers_in_the_header_are_refused_without_a_huge_allocation_or_a_long_loop(good, place, value):
    data, start, path = good
    at = int(place * start)
    damaged = data[:at] + struct.pack("<Q", value) + data[at + 8 :]
    before = _peak_bytes()
    refused = refused_or_loaded(path, damaged)
    assert not refused or damaged != data
    assert _peak_bytes() - before < 2**27


@pytest.mark.parametrize("header", [b"", b"{}", b"[]", b"{]", b"\xff\xfe", b"null", b'{"a": 1}', b"[" * 100_000])
def test_a_safetensors_header_that_is_not_a_table_is_refused(tmp_path, header):
    assert refused_or_loaded(tmp_path / "model.safetensors", struct.pack("<Q", len(header)) + header)


def test_safetensors_offsets_past_the_end_are_refused(tmp_path):
    header = b'{"model.norm.weight":{"dtype":"F32","shape":[96],"data_offsets":[0,384]}}'
    data = struct.pack("<Q", len(header)) + header + bytes(380)
    assert refused_or_loaded(tmp_path / "model.safetensors", data)
