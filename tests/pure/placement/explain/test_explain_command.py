"""``shardwright explain`` as a command: without weights, torch or ray, with its exit status and its JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from placement.checkpoint.hf import config_json
from serve_app.commands import cli
from tests.support.models.safetensors_files import tensors_of, write

_CONFIG = {
    "model_type": "llama",
    "hidden_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 256,
    "vocab_size": 101,
    "max_position_embeddings": 128,
    "torch_dtype": "float32",
}

_LOADED = """
import sys
from serve_app.commands import cli
try:
    cli.main()
finally:
    print(*sorted({"torch", "ray", "transformers", "zmq"} & set(sys.modules)), file=sys.stderr)
"""

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a config.json and nothing else."""
    (tmp_path / "config.json").write_text(json.dumps(_CONFIG))
    return tmp_path


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs ``shardwright explain`` with the given arguments: (exit status, stdout, stderr)."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["shardwright", "explain", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return (int(ended.value.code or 0), *capsys.readouterr())

    return run


def test_json_of_a_bare_config_without_torch_or_ray(model: Path) -> None:
    asked = ["--layout", "tp=2,pp=2", "--tokens", "3", "--batch", "2", "--context", "40", "--json"]
    run = [sys.executable, "-c", _LOADED, "explain", str(model), *asked]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == "\n"
    found = json.loads(done.stdout)
    assert found["layout"] == "tp=2,pp=2"
    assert found["step"] == {"batch": 2, "tokens": [3, 3], "context": [37, 37], "dp_rank": [0, 0], "dtype": "float32"}
    assert found["groups"]["tp"] == [[0, 1], [2, 3]]
    assert [rank["q_heads"] for rank in found["ranks"][:2]] == [[0, 1, 2, 3], [4, 5]]
    [boundary] = [each for each in found["traffic"] if (each["op"], each["where"]) == ("send", "stage boundary")]
    assert boundary["payload_bytes"] >= 3 * 96 * 4


def test_the_report_of_a_bare_config(command: Command, model: Path) -> None:
    status, out, _ = command(model, "--layout", "tp=3", "--dtype", "bfloat16")
    assert status == 0
    assert "rank 2" in out
    assert "hidden [1 token, 96]" in out


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_an_illegal_layout_is_a_no_with_what_would_work(command: Command, model: Path, form: tuple[str, ...]) -> None:
    status, out, err = command(model, "--layout", "tp=7", *form)
    assert status == 1
    if form:
        [violation] = json.loads(out)["violations"]
        assert violation["field"] == "tp"
        assert "tp=6" in violation["suggestions"]
    else:
        assert "7 is more than the 6 query heads" in err
        assert "Try tp=6" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--layout", "tp=x"], "tp is 'x'"),
        (["--layout", "tq=2"], "did you mean"),
        (["--tokens", "0"], "tokens"),
        (["--tokens", "9", "--context", "5"], "context 5 is shorter than the 9 tokens"),
        (["--dtype", "int8"], "dtype"),
        (["--colour"], "colour"),
    ],
)
def test_a_mistake_is_status_two(command: Command, model: Path, arguments: list[str], said: str) -> None:
    status, _, err = command(model, *arguments)
    assert status == 2
    assert said in err


def test_a_model_that_is_not_there_is_status_two(command: Command, tmp_path: Path) -> None:
    status, _, err = command(tmp_path / "nothing")
    assert status == 2
    assert "no such folder" in err


def test_weights_that_are_there_must_be_the_models(command: Command, model: Path) -> None:
    tensors = tensors_of(config_json.read(model))
    file = write(model / "model.safetensors", tensors)
    assert command(model)[0] == 0
    file.write_bytes(file.read_bytes()[:-1])
    assert command(model) == (2, "", f"error: {file}: damaged or incomplete safetensors file (it ends 1 bytes too early)\n")
    write(file, {name: each for name, each in tensors.items() if name != "lm_head.weight"})
    status, _, err = command(model)
    assert (status, "missing: lm_head.weight" in err) == (2, True)


def test_of_weights_that_are_not_all_there_nothing_is_asked(command: Command, model: Path) -> None:
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": "gone.safetensors"}}))
    assert command(model)[0] == 0


# Hand-off


def test_a_handoff_as_text_and_as_json(command: Command, model: Path) -> None:
    pools = ("--prefill", "tp=2", "--decode", "pp=2", "--context", "100")
    status, out, _ = command(model, *pools)
    assert status == 0
    assert "prefill tp=2 hands KV to decode pp=2" in out
    status, out, _ = command(model, *pools, "--json")
    found = json.loads(out)
    assert (status, found["prompt_bytes_per_token"]) == (0, 5 * 2 * 3 * 16 * 4)
    assert found["moved_bytes"] == found["prompt_bytes"] == sum(copy["bytes"] for copy in found["copies"])
    assert {(copy["source"], copy["destination"]) for copy in found["copies"]} == {(0, 0), (1, 0), (0, 1), (1, 1)}
    assert sum(found["sent_bytes"].values()) == sum(found["received_bytes"].values()) == found["moved_bytes"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prefill", "tp=2"], "give --prefill and --decode"),
        (["--prefill", "tp=2", "--decode", "tp=1", "--layout", "tp=2"], "each pool has a layout of its own"),
        (["--prefill", "tp=2", "--decode", "tp=1", "--batch", "2"], "with --context"),
        (["--prefill", "tp=2", "--decode", "tp=1", "--context", "0"], "at least one token"),
        (["--prefill", "tp=2", "--decode", "tp=x"], "tp is 'x'"),
    ],
)
def test_a_mistake_in_a_handoff_is_status_two(command: Command, model: Path, arguments: list[str], said: str) -> None:
    status, _, err = command(model, *arguments)
    assert status == 2
    assert said in err


def test_an_illegal_pool_is_a_no(command: Command, model: Path) -> None:
    status, _, err = command(model, "--prefill", "tp=2", "--decode", "tp=7")
    assert status == 1
    assert "layout tp=7 cannot be used" in err
