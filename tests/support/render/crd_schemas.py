"""Checks objects against the schemas of custom resource definitions, as an API server does."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml


@cache
def schema_of(kind: str) -> dict[str, Any]:
    """The schema of a kind of ray.io/v1, closed for unknown fields. Skips the test where the definitions are absent."""
    folder = next((parent / "shared/data/crds" for parent in Path(__file__).resolve().parents if _has(parent)), None)
    if folder is None:
        pytest.skip("KubeRay's resource definitions (../shared/data/crds) are not here")
    plural = kind.lower() + "s"
    found = yaml.load((folder / f"ray.io_{plural}.yaml").read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    version = next(each for each in found["spec"]["versions"] if each["name"] == "v1")
    return _closed(version["schema"]["openAPIV3Schema"])


def faults(manifest: dict[str, Any]) -> list[str]:
    """What is wrong with one ray.io object; empty: nothing."""
    schema = schema_of(manifest["kind"])
    filled = _filled(copy.deepcopy(manifest), schema)
    found = jsonschema.Draft202012Validator(schema).iter_errors(filled)
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message[:300]}" for error in found]


def _has(folder: Path) -> bool:
    return (folder / "shared/data/crds").is_dir()


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Structural schemas of Kubernetes in the words of JSON Schema."""
    new = {key: value for key, value in schema.items() if not key.startswith("x-") and key not in ("nullable", "format")}
    if schema.get("x-kubernetes-int-or-string"):
        new.pop("type", None)
        new = {key: value for key, value in new.items() if key not in ("anyOf",)} | {"type": ["integer", "string"]}
    elif schema.get("nullable") and "type" in new:
        new["type"] = [new["type"], "null"]
    if "properties" in schema:
        new["properties"] = {name: _closed(each) for name, each in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields") and "additionalProperties" not in schema:
            new["additionalProperties"] = False
    if isinstance(schema.get("additionalProperties"), dict):
        new["additionalProperties"] = _closed(schema["additionalProperties"])
    if "items" in schema:
        new["items"] = _closed(schema["items"])
    return new


def _filled(value: Any, schema: dict[str, Any]) -> Any:
    """Defaults of absent fields, nulls dropped."""
    if isinstance(value, dict):
        value = {key: each for key, each in value.items() if each is not None}
        properties = schema.get("properties", {})
        for name, each in properties.items():
            if name not in value and "default" in each:
                value[name] = copy.deepcopy(each["default"])
        rest = schema.get("additionalProperties")
        rest = rest if isinstance(rest, dict) else {}
        return {key: _filled(each, properties.get(key, rest)) for key, each in value.items()}
    if isinstance(value, list):
        return [_filled(each, schema.get("items", {})) for each in value]
    return value
