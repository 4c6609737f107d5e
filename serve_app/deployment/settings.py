"""The settings of a service: one value, the same on the command line, as Serve arguments and in YAML.

Each setting is one field: its type, default and help text stand once, and it keeps its name to the place of use.

    shardwright serve --max-sequences 32          ┐
    serve run serve_app.app:build max_sequences=32├→ ServeArgs ─replica_settings─→ ReplicaSettings ──→ EngineConfig, RankConfig
    args: {max_sequences: 32} in a Serve file     ┘
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from cluster.replica.options import ReplicaOptions
from placement.model.bounds import PositiveInt
from placement.model.errors import ReportedError
from serve_app.deployment.catalog import DEFAULT_MODEL

log = logging.getLogger("shardwright.settings")

RENAMED = {"entrance": "ingress_node"}
"""Former names of settings, which are accepted for one version."""


class ServeArgs(ReplicaOptions):
    """Everything that may be set of a service. What depends on the model or the machines is checked by `replica_settings`."""

    model_config = ConfigDict(title="Model, layout and endpoint")

    model: str = DEFAULT_MODEL
    """A Hugging Face folder, a GGUF file, a hub id, or a built-in name."""
    layout: str = ""
    """Parallel layout, for example tp=2,pp=2 or replicas=2."""
    prefill: str = ""
    """With --decode or --mixed, in place of --layout: a pool for prompts, layout and replicas as in tp=2*2."""
    decode: str = ""
    """The pool for the tokens after them, for example pp=2*1."""
    mixed: str = ""
    """A pool for both, by itself or beside --prefill or --decode."""
    require_prefill: bool = False
    """Refuse requests while prompts are not handed off between the pools."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What the ranks run on: auto, cpu or cuda."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of weights and KV cache: auto, float32 or bfloat16."""
    max_model_len: PositiveInt | None = None
    """Longest sequence, in tokens; default: the model's own limit, 8192, or what --kv-bytes hold, if shorter."""
    replica_wait_s: Annotated[float, Field(gt=0)] = 30.0
    """Seconds a request waits for an engine replica while none runs, before it is refused."""
    ingress_node: Literal["head", "anywhere"] = "head"
    """Node of the HTTP process: head, whatever happens to the others, or anywhere, as Serve decides."""
    served_name: str | None = None
    """Name clients ask for."""
    api_keys: tuple[str, ...] = ()
    """Bearer key clients must send; may be given several times."""
    api_keys_file: str | None = None
    """File of further keys, one a line, where the HTTP process runs; a missing file has none."""

    @model_validator(mode="before")
    @classmethod
    def _accepts_former_writings(cls, given: Any) -> Any:
        """`RENAMED` names, and a `disk_cache_bytes` of null, which means its default."""
        if not isinstance(given, Mapping):
            return given
        for old, new in RENAMED.items():
            if old in given and new not in given:
                log.warning("%s is now called %s; the old name goes with the next version", old, new)
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
    """Arguments that mean nothing to `ServeArgs`: says which, and what would."""

    code = "bad_argument"


def read_api_keys(args: ServeArgs) -> tuple[str, ...]:
    """The keys that clients may send, those of the file included; none: no key is asked for."""
    path = None if args.api_keys_file is None else Path(args.api_keys_file)
    lines = path.read_text().splitlines() if path is not None and path.exists() else []
    return (*args.api_keys, *(line.strip() for line in lines if line.strip()))


def parse_args(arguments: Mapping[str, Any]) -> ServeArgs:
    """Raises `ArgumentError`, for all mistakes at once."""
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
