"""Typed look-ups in the header of a checkpoint, with errors that name the file and the field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from placement.model.spec import ModelError

Spec = TypeVar("Spec", bound=BaseModel)

NOT_GIVEN: Any = object()
"""Default of a required field."""

_MOST_LAYERS = 10_000


@dataclass(frozen=True)
class HeaderFields:
    """The named values of one header. A value of None counts as absent, as it does in config.json. All look-ups raise
    `ModelError` if a required field is missing or has the wrong type."""

    file: Path
    values: Mapping[str, Any]

    def whole(self, name: str, default: Any = NOT_GIVEN) -> Any:
        """Returns the whole number in the field `name`, or `default` (which may be None) if the field is absent or null. Raises
        `ModelError` if a field without `default` is missing, or if the value is not an int."""
        return self._get(name, default, "a whole number", lambda value: type(value) is int)

    def num_layers(self, name: str) -> int:
        """Returns the number of layers in the field `name`. Raises `ModelError` if the field is missing, is not a whole number
        or is not from 1 to 10,000: a damaged file would otherwise exhaust the memory."""
        found = self.whole(name)
        if not 1 <= found <= _MOST_LAYERS:
            raise self.fault(name, f"must be from 1 to {_MOST_LAYERS}")
        return int(found)

    def number(self, name: str, default: Any = NOT_GIVEN) -> Any:
        """Returns the number in the field `name` as a float, or `default` (which may be None) if the field is absent or null.
        Raises `ModelError` if a field without `default` is missing, or if the value is not a number."""
        value = self._get(name, default, "a number", lambda value: type(value) in (int, float))
        return float(value) if isinstance(value, int) else value

    def flag(self, name: str, default: bool) -> bool:
        """Returns the truth value in the field `name`, or `default` if the field is absent or null. Raises `ModelError` if the
        value is neither true nor false."""
        return bool(self._get(name, default, "true or false", lambda value: isinstance(value, bool)))

    def text(self, name: str, default: Any = NOT_GIVEN) -> Any:
        """Returns the text in the field `name`, or `default` (which may be None) if the field is absent or null. Raises
        `ModelError` if a field without `default` is missing, or if the value is not a text."""
        return self._get(name, default, "a text", lambda value: isinstance(value, str))

    def texts(self, name: str) -> list[str] | None:
        """Returns the list of texts in the field `name`, or None if the field is absent or null. Raises `ModelError` if the
        value is not a list of texts."""
        found: list[str] | None = self._get(name, None, "a list of texts", _is_texts)
        return found

    def wholes(self, name: str) -> list[int] | None:
        """Returns the list of whole numbers (or booleans) in the field `name`, or None if the field is absent or null. Raises
        `ModelError` if the value is not such a list."""
        found: list[int] | None = self._get(name, None, "a list of whole numbers", _is_wholes)
        return found

    def numbers(self, name: str) -> list[float]:
        """Returns the list of numbers in the field `name`, as floats. Raises `ModelError` if the field is missing or is not a
        list of numbers."""
        found: list[float] = self._get(name, NOT_GIVEN, "a list of numbers", _is_numbers)
        return [float(number) for number in found]

    def group(self, name: str) -> HeaderFields | None:
        """Returns the nested object in the field `name` as `HeaderFields` of the same file, or None if the field is absent or
        null. Raises `ModelError` if the value is not an object."""
        found = self._get(name, None, "an object", lambda value: isinstance(value, dict))
        return None if found is None else HeaderFields(self.file, found)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Returns the token id, or the list of token ids, in the field `name` as a tuple; an empty tuple if the field is absent
        or null. Raises `ModelError` if the value is neither."""
        found = self._get(name, (), "a token id or a list of token ids", _is_token_ids)
        return (found,) if isinstance(found, int) else tuple(found)

    def fault(self, name: str, what: str) -> ModelError:
        """Returns, but does not raise, an error that names the file, the field `name` and its value. `what` completes the
        sentence ``..., but``, for example ``must be at least 1``."""
        return ModelError(f"{self.file}: {name} is {_short(self.values.get(name))}, but {what}")

    def _get(self, name: str, default: Any, expected: str, is_good: Any) -> Any:
        value = self.values.get(name)
        if value is None:
            if default is NOT_GIVEN:
                raise ModelError(f"{self.file}: the field {name} is missing")
            return default
        if not is_good(value):
            raise self.fault(name, f"must be {expected}")
        return value


def made(kind: type[Spec], file: Path, names: Mapping[str, str], /, **values: Any) -> Spec:
    """Returns ``kind(**values)``, a spec of the pydantic class `kind`. `file` and `names`, which maps fields of the spec to
    their names in the file, are used for error texts only. Raises `ModelError`, with all faults, if values are not valid."""
    try:
        return kind(**values)
    except ValidationError as error:
        faults = "; ".join(_fault(fault, names) for fault in error.errors())
        raise ModelError(f"{file}: {faults}") from None


def _fault(fault: Any, names: Mapping[str, str]) -> str:
    if not fault["loc"]:
        message = str(fault["msg"]).removeprefix("Value error, ")
        used = [f"{field} is {name}" for field, name in names.items() if f"{field}=" in message and field != name]
        return f"{message} ({', '.join(used)} in the file)" if used else message
    field = ".".join(map(str, fault["loc"]))
    return f"{names.get(field, field)} is {_short(fault['input'])}: {fault['msg']}"


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)


def _is_wholes(value: object) -> bool:
    return isinstance(value, list) and all(type(entry) in (int, bool) for entry in value)


def _is_numbers(value: object) -> bool:
    return isinstance(value, list) and all(type(entry) in (int, float) for entry in value)


def _is_token_ids(value: object) -> bool:
    return type(value) is int or (isinstance(value, list) and all(type(entry) is int for entry in value))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
