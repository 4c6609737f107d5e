"""What people get wrong: one message that names it on stderr, exit status 2, and nothing left behind."""

from __future__ import annotations

import json
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import ray
from safetensors.torch import load_file, save_file

from placement.model.spec import ModelError
from serve_app.app import build
from serve_app.deployment.catalog import BUILT_IN, DEFAULT_MODEL, resolve
from serve_app.deployment.settings import ServeArgs
from tests.ray.server import SHARDWRIGHT, run
from tests.support.long_cases import long
from tests.support.models.tiny_models import tiny

ONLY_USAGE = 10
"""Seconds within which a mistake is told that needs no cluster to be seen (starting Ray takes longer)."""


def refused(*args: str, env: dict[str, str] | None = None, timeout_s: float = 240, command: Sequence[str] = SHARDWRIGHT) -> str:
    """The one message of a command that must fail with status 2 (on a port of the kernel's choice, unless one is given)."""
    any_port = ("--port", "0") if args[0] == "serve" and "--port" not in args else ()
    done = run(*args, *any_port, env=env, timeout_s=timeout_s, command=command)
    assert done.returncode == 2, done
    assert done.stdout == ""
    lines = done.stderr.strip().splitlines()
    assert lines[0].startswith("error: ")
    assert all(line.startswith("- ") for line in lines[1:]), done.stderr
    return done.stderr


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A good model folder, to be spoiled."""
    return Path(shutil.copytree(tiny("llama3").folder, tmp_path / "model"))


def cut_short(folder: Path) -> str:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return str(file)


def no_config(folder: Path) -> str:
    (folder / "config.json").unlink()
    return "config.json"


def config_cut_short(folder: Path) -> str:
    config = folder / "config.json"
    config.write_text(config.read_text()[:40])
    return "config.json"


def unknown_architecture(folder: Path) -> str:
    change_config(folder, model_type="mamba", architectures=["MambaForCausalLM"])
    return "mamba"


def wrong_size(folder: Path) -> str:
    change_config(folder, hidden_size=-3)
    return "hidden_size"


def broken_tokenizer(folder: Path) -> str:
    (folder / "tokenizer.json").write_text("{not json")
    return "tokenizer.json"


def half(folder: Path) -> str:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    return str(file)


def no_weights(folder: Path) -> str:
    (folder / "model.safetensors").unlink()
    return "model.safetensors"


def missing_tensor(folder: Path) -> str:
    change_tensors(folder, lambda tensors: tensors.pop("model.layers.2.mlp.up_proj.weight"))
    return "model.layers.2.mlp.up_proj.weight"


def change_config(folder: Path, **fields: object) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))


def change_tensors(folder: Path, change: Callable[[dict], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


OTHERS = [no_config, config_cut_short, unknown_architecture, broken_tokenizer, cut_short, half, no_weights]


@pytest.mark.parametrize("spoil", [wrong_size, missing_tensor, *long(*OTHERS)])
def test_a_bad_model_is_named_before_ray_starts(checkpoint: Path, spoil: Callable[[Path], str], tmp_path: Path) -> None:
    at_fault, before = spoil(checkpoint), sorted(checkpoint.rglob("*"))
    sessions = tmp_path / "ray"
    sessions.mkdir()
    env = {"RAY_TMPDIR": str(sessions)}
    assert at_fault in refused("serve", str(checkpoint), "--layout", "tp=2", env=env, timeout_s=ONLY_USAGE)
    assert list(sessions.iterdir()) == []
    assert sorted(checkpoint.rglob("*")) == before


@pytest.mark.parametrize("spoil", [half, missing_tensor, broken_tokenizer])
def test_no_application_is_built_for_a_bad_model(checkpoint: Path, spoil: Callable[[Path], str]) -> None:
    """What `serve run` and `serve deploy` call; no cluster is needed to refuse."""
    at_fault = spoil(checkpoint)
    with pytest.raises(ModelError, match=re.escape(at_fault)):
        build(ServeArgs(model=str(checkpoint)))
    assert not ray.is_initialized()


@pytest.mark.long
@pytest.mark.parametrize("spoil", [half, broken_tokenizer])
def test_a_bad_model_is_not_verified(checkpoint: Path, spoil: Callable[[Path], str]) -> None:
    assert spoil(checkpoint) in refused("verify", str(checkpoint))


LATE = """
import serve_app.deployment.preflight
serve_app.deployment.preflight.check_files = lambda path, spec: None
from ray import serve
{more}
from serve_app.commands import cli
cli.main()
"""
"""The command, blind to what its preflight would see, as if the files had changed after it."""

FAILING_SERVE = """
def fail(*args, **kwargs):
    raise RuntimeError("Serve is\\noverloaded")
serve.status = serve.shutdown = fail
"""


@pytest.mark.long
@pytest.mark.parametrize(("more", "named"), [("", ""), (FAILING_SERVE, "RuntimeError: Serve is")], ids=["rank", "serve"])
def test_what_comes_late_is_one_message_too(checkpoint: Path, more: str, named: str) -> None:
    """A file that a rank finds cut short; a Serve that raises, even at the end. Ray has started, and is gone."""
    named = named or half(checkpoint)
    sessions = Path(tempfile.mkdtemp(prefix="s", dir="/tmp"))  # short: it holds Unix sockets
    command = (sys.executable, "-c", LATE.format(more=more))
    message = refused("serve", str(checkpoint), command=command, env={"RAY_TMPDIR": str(sessions)})
    assert message.lstrip().startswith(f"error: {named}"), "an error of a rank is its own text, without the name of its class"
    assert len(message.strip().splitlines()) == 1
    assert list(sessions.iterdir()) != []
    shutil.rmtree(sessions)


@pytest.mark.long
@pytest.mark.parametrize("size", [10, 5000, 40_000_000])
def test_a_gguf_file_cut_short_is_named(tmp_path: Path, size: int) -> None:
    file = tmp_path / "short.gguf"
    with resolve(DEFAULT_MODEL).path.open("rb") as whole:
        file.write_bytes(whole.read(size))
    assert str(file) in refused("serve", str(file))


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["/nowhere/at/all"], "/nowhere/at/all"),
        (["MODEL", "--layout", "pp=5"], "pp=5"),
        *long(
            (["MODEL", "--layout", "tp=0"], "tp"),
            (["MODEL", "--layout", "width=2"], "width"),
            (["MODEL", "--kv-bytes", "100"], "kv_bytes"),
            (["MODEL", "--kv-bytes", "900TiB"], "kv_bytes"),
            (["MODEL", "--kv-bytes", "much"], "kv_bytes"),
            (["MODEL", "--disk-cache", "/etc/passwd"], "disk_cache '/etc/passwd': "),
            (["MODEL", "--max-model-len", "1000000"], "max_model_len"),
            (["MODEL", "--device", "tpu"], "device"),
            (["MODEL", "--step-timeout", "0"], "step_timeout_s"),
            (["MODEL", "--host", "203.0.113.7", "--port", "8999"], "203.0.113.7"),
        ),
    ],
)
def test_an_argument_that_cannot_be_is_named_before_ray_starts(args: list[str], named: str) -> None:
    given = [str(tiny("llama3").folder) if arg == "MODEL" else arg for arg in args]
    assert named in refused("serve", *given, timeout_s=ONLY_USAGE)


def test_a_busy_port_is_named_before_ray_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert port in refused("serve", str(tiny("llama3").folder), "--port", port, timeout_s=ONLY_USAGE)


@pytest.mark.long
def test_a_cluster_that_does_not_answer_is_named() -> None:
    began = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        silent.close()
        message = refused("serve", str(tiny("llama3").folder), env={"RAY_ADDRESS": address})
    assert address in message
    assert time.monotonic() - began < 40


@pytest.mark.long
def test_what_is_no_address_is_named() -> None:
    message = refused("serve", str(tiny("llama3").folder), "--address", "garbage")
    assert message.startswith("error: no Ray cluster answers at garbage: ")


def test_an_option_that_does_not_exist() -> None:
    done = run("serve", "--tensor-parallel", "2")
    assert done.returncode == 2
    assert "--tensor-parallel" in done.stderr
    assert "Traceback" not in done.stderr


def test_models_are_listed_for_machines() -> None:
    done = run("models", "--json")
    assert done.returncode == 0
    assert [row["name"] for row in json.loads(done.stdout)] == list(BUILT_IN)


@pytest.mark.parametrize("command", [[], *long(["serve"], ["chat"], ["models"])])
def test_help_is_given(command: list[str]) -> None:
    done = run(*command, "--help")
    assert done.returncode == 0
    assert "Usage" in done.stdout
