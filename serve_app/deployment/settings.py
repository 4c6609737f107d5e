"""The settings of a service: the same value on the command line, as Serve arguments and in YAML.

Each setting is one field. Its type, default and help text are written once, and it keeps its name down to where it is used.

    shardwright serve --max-sequences 32          ┐
    serve run serve_app.app:build max_sequences=32├→ ServeArgs ─replica_settings─→ ReplicaSettings ──→ EngineConfig, RankConfig
    args: {max_sequences: 32} in a Serve file     ┘
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from cluster.replica.options import ReplicaOptions
from placement.checkpoint.directory.text_file import read_text
from placement.model.bounds import PositiveInt
from placement.model.errors import ReportedError
from serve_app.deployment.catalog import DEFAULT_MODEL

log = logging.getLogger("shardwright.settings")

RENAMED = {"entrance": "ingress_node"}
"""Former names of settings, which are accepted for one version."""


def _as_browsers_write_it(origin: str) -> str:
    """Returns `origin` in lower case. Raises `ValueError` if it is none, or is written in a way that no browser sends."""
    found = _ORIGIN.fullmatch(origin.strip().lower())
    if found is None:
        raise ValueError("an origin is a scheme, a host and perhaps a port, without a path, as in http://localhost:3000, or *")
    if found["port"] is not None and int(found["port"]) == _DEFAULT_PORTS.get(found["scheme"]):
        raise ValueError(f"browsers leave out :{found['port']}, the port that {found['scheme']} has anyway: leave it out")
    return found[0]


_ORIGIN = re.compile(r"\*|null|(?P<scheme>[a-z][a-z0-9+.-]*)://(?:\[[0-9a-f:.]+\]|[^\s/?#@:,*\[\]]+)(?::(?P<port>[0-9]{1,5}))?")
_DEFAULT_PORTS = {"http": 80, "https": 443}
WebOrigin = Annotated[str, AfterValidator(_as_browsers_write_it)]


class ServeArgs(ReplicaOptions):
    """All settings of a service. `replica_settings` checks those that depend on the model or the machines."""

    model_config = ConfigDict(title="Model, layout and endpoint")

    model: str = DEFAULT_MODEL
    """A Hugging Face folder, a GGUF file, a hub id, or a built-in name."""
    layout: str = ""
    """Parallel layout, for example tp=2,pp=2 or replicas=2."""
    prefill: str = ""
    """Layout and number of replicas of the prefill pool, for example tp=2*2; with --decode or --mixed, in place of --layout."""
    decode: str = ""
    """Layout and number of replicas of the decode pool, for example pp=2*1; with --prefill or --mixed."""
    mixed: str = ""
    """Layout and number of replicas of a pool for both prefill and decode, alone or with --prefill or --decode."""
    require_prefill: bool = False
    """Refuse requests while prompts cannot be handed off between the pools."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the ranks: auto, cpu or cuda."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the weights and the KV cache: auto, float32 or bfloat16."""
    max_model_len: PositiveInt | None = None
    """Maximum sequence length in tokens; default: the smallest of the model's limit, 8192, and what the KV cache can hold."""
    replica_wait_s: Annotated[float, Field(gt=0)] = 30.0
    """Seconds that a request waits for an engine replica while none is running, before it is refused."""
    replay_wait_s: Annotated[float, Field(gt=0)] = 120.0
    """Seconds that a request whose replica was lost waits for another replica, or for the same one to come back."""
    ingress_node: Literal["head", "anywhere"] = "head"
    """Node of the HTTP process: head, to be independent of other nodes, or anywhere, as Ray Serve decides."""
    served_name: str | None = None
    """Model name that clients use in requests; default: the name of the model."""
    api_keys: tuple[str, ...] = ()
    """Bearer key that clients must send; may be given several times."""
    api_keys_file: str | None = None
    """File with further keys, one per line, on the node of the HTTP process; a missing file counts as empty."""

    allow_origins: tuple[WebOrigin, ...] = ()
    """Origin of web pages that may use the endpoint (CORS), such as http://localhost:3000, or * for all; may be given several
    times."""
    sse_ping_s: Annotated[float, Field(ge=0)] = 15.0
    """Seconds of silence after which a stream gets a comment line, so that nobody takes the connection for dead; 0: never."""

    @model_validator(mode="before")
    @classmethod
    def _accepts_former_writings(cls, given: Any) -> Any:
        """Accept the names in `RENAMED`, and a `disk_cache_bytes` of null, which means its default."""
        if not isinstance(given, Mapping):
            return given
        for old, new in RENAMED.items():
            if old in given and new not in given:
                log.warning("%s is now called %s; the old name will be removed in the next version", old, new)
                given = {new if name == old else name: value for name, value in given.items()}
        return {name: value for name, value in given.items() if (name, value) != ("disk_cache_bytes", None)}

    @field_validator("disk_cache", mode="before")
    @classmethod
    def _names_a_directory(cls, path: Any) -> Any:
        if isinstance(path, str) and not path.strip():
            raise ValueError("must name a directory, '.' for the working directory; leave it out for none")
        return path

    @field_validator("disk_cache_bytes")
    @classmethod
    def _bounds_a_directory(cls, limit: int, info: ValidationInfo) -> int:
        if info.data.get("disk_cache", "") is None:
            raise ValueError("bounds the directory of disk_cache, and there is none: give both, or leave it out")
        return limit


class ArgumentError(ReportedError, ValueError):
    """Arguments that `ServeArgs` does not accept. The message names them and the accepted ones."""

    code = "bad_argument"


def read_api_keys(args: ServeArgs) -> tuple[str, ...]:
    """Returns the accepted API keys: those in `args`, and the lines of the file ``args.api_keys_file``, read now. An empty
    tuple means that no key is needed.

    A missing file counts as empty. Raises `OSError` or `UnicodeDecodeError` if it cannot be read.
    """
    path = None if args.api_keys_file is None else Path(args.api_keys_file)
    lines = read_text(path).splitlines() if path is not None and path.exists() else []
    return (*args.api_keys, *(line.strip() for line in lines if line.strip()))


def parse_args(arguments: Mapping[str, Any]) -> ServeArgs:
    """Parse `arguments`, the fields of `ServeArgs` as plain values or texts.

    Returns the settings. Raises `ArgumentError`, with all errors in one message, for an unknown name or a value that is not
    valid.
    """
    try:
        return ServeArgs.model_validate(arguments)
    except ValidationError as error:
        found = error.errors()
    unknown = [str(each["loc"][0]) for each in found if each["type"] == "extra_forbidden"]
    wrong = [
        f"{each['loc'][0]}: {each['msg']} (given: {each['input']!r})" for each in found if each["type"] != "extra_forbidden"
    ]
    if unknown:
        own = [name for name in ServeArgs.model_fields if name not in ReplicaOptions.model_fields]
        wrong.append(f"unknown: {', '.join(unknown)}; the arguments are {', '.join([*own, *ReplicaOptions.model_fields])}")
    raise ArgumentError("; ".join(wrong))
