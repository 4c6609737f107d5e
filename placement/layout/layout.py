"""The parallel layout: one frozen value with the size of every parallel axis (DP, PP, CP, TP, DCP, EP).

    stage_ranks = attn_dp * cp * tp = moe_dp * ep * moe_tp
    world       = pp * stage_ranks            (ranks of one replica)
    devices     = replicas * world

Commands, configs and errors use the text form ``tp=2,pp=2``, in which omitted sizes are 1. `moe_tp` defaults to the quotient of
a stage's ranks and ``moe_dp * ep``: both ``tp=2`` and ``tp=16,ep=8`` mean moe_tp=2.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from difflib import get_close_matches
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from placement.model.errors import ReportedError

Size = Annotated[int, Field(ge=1)]
"""Number of ranks along one axis."""

_LIST_SEPARATOR = "/"
"""Separates the entries of a list field in the text form: ``stage_layers=16/14``."""


class LayoutError(ReportedError, ValueError):
    """A layout text cannot be parsed, or a layout breaks rules. ``str()`` is the complete message."""

    code = "bad_layout"


class Layout(BaseModel):
    """Parallel sizes of a deployment. Sizes count ranks (devices) and default to 1 (or off), `moe_tp` to `rest_for_moe_tp`.

    To change sizes, construct a new `Layout` from `asked`: ``model_copy`` would keep the old `moe_tp`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    replicas: Size = 1
    pp: Size = 1
    attn_dp: Size = 1
    cp: Size = 1
    tp: Size = 1
    dcp: Size = 1
    ep: Size = 1
    moe_tp: Size = 1
    moe_dp: Size = 1
    sp: bool = False
    redundant_experts: Annotated[int, Field(ge=0)] = 0
    stage_layers: tuple[Size, ...] | None = None
    tp_shares: tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...] | None = None
    cp_style: Literal["ring", "allgather"] = "ring"
    dispatch: Literal["auto", "gather", "a2a"] = "auto"
    lm_head: Literal["auto", "dp_rank", "stage"] = "auto"

    @model_validator(mode="after")
    def _moe_tp_is_the_rest(self) -> Self:
        if "moe_tp" not in self.model_fields_set:
            object.__setattr__(self, "moe_tp", self.rest_for_moe_tp)
        return self

    @property
    def rest_for_moe_tp(self) -> int:
        """Number of ranks of a stage divided by ``moe_dp * ep``, rounded down, at least 1: the only legal `moe_tp`, if the
        division is exact."""
        return max(1, self.stage_ranks // (self.moe_dp * self.ep))

    @property
    def asked(self) -> dict[str, Any]:
        """Fields that differ from their default, by name. ``Layout(**layout.asked) == layout``."""
        usual = {name: field.default for name, field in type(self).model_fields.items()} | {"moe_tp": self.rest_for_moe_tp}
        return {name: getattr(self, name) for name in usual if getattr(self, name) != usual[name]}

    @property
    def stage_ranks(self) -> int:
        """Number of ranks of one pipeline stage: ``attn_dp * cp * tp``."""
        return self.attn_dp * self.cp * self.tp

    @property
    def world(self) -> int:
        """Number of ranks of one replica: ``pp * stage_ranks``."""
        return self.pp * self.stage_ranks

    @property
    def devices(self) -> int:
        """Number of ranks of the whole deployment: ``replicas * world``."""
        return self.replicas * self.world

    @property
    def kv_owners(self) -> int:
        """Number of ranks over which the KV blocks of one sequence are split: ``cp * dcp`` (see
        `placement.ownership.context`)."""
        return self.cp * self.dcp

    @classmethod
    def parse(cls, text: str) -> Self:
        """Returns the layout of a text such as ``tp=2,pp=2,stage_layers=16/14``; an empty text is the single-rank layout.

        Raises `LayoutError` that lists every fault of the text: unknown or repeated fields, and illegal values. Whether the
        layout suits a model is not checked (see `placement.legality.check`).
        """
        values: dict[str, Any] = {}
        faults: list[str] = []
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = (side.strip() for side in part.partition("="))
            if name not in cls.model_fields:
                faults.append(_unknown(name, list(cls.model_fields)))
            elif name in values:
                faults.append(f"{name} is given twice")
            else:
                read, expected = _FORMS.get(name, _SIZE)
                values[name] = read(value)
                if values[name] is None:
                    faults.append(f"{name} is {value!r}, but must be {expected}")
        if faults:
            raise LayoutError(f"layout {text!r}: {'; '.join(faults)}")
        return cls._made_of(values, text)

    @classmethod
    def _made_of(cls, values: dict[str, Any], text: str) -> Self:
        try:
            return cls(**values)
        except ValidationError as error:
            names = dict.fromkeys(str(fault["loc"][0]) for fault in error.errors())
            faults = (f"{name} is {text_of(values[name])}, but must be {_FORMS.get(name, _SIZE)[1]}" for name in names)
            raise LayoutError(f"layout {text!r}: {'; '.join(faults)}") from None

    def __str__(self) -> str:
        """Returns the shortest text form: fields at their default are omitted; the single-rank layout is ``tp=1``."""
        asked = self.asked
        first = [name for name in ("tp", "pp") if name in asked]
        return ",".join(f"{name}={text_of(asked[name])}" for name in dict.fromkeys((*first, *asked))) or "tp=1"


def _whole_number(text: str) -> int | None:
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _list_of(read: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...] | None]:
    def read_list(text: str) -> tuple[Any, ...] | None:
        entries = tuple(read(entry.strip()) for entry in text.split(_LIST_SEPARATOR))
        return None if None in entries else entries

    return read_list


_LM_HEADS = {over: over for over in ("auto", "dp_rank", "stage")} | {"lane": "dp_rank"}
"""Values of `lm_head`. ``lane`` is the former name of ``dp_rank``."""

_SIZE: tuple[Callable[[str], Any], str] = (_whole_number, "a whole number from 1 to 999999999")
_FORMS: dict[str, tuple[Callable[[str], Any], str]] = {
    "sp": ({"true": True, "false": False}.get, "true or false"),
    "redundant_experts": (_whole_number, "a whole number from 0 to 999999999"),
    "stage_layers": (_list_of(_whole_number), "whole numbers of at least 1, one per stage, as in 16/14"),
    "tp_shares": (_list_of(_number), "numbers above 0, one per tp rank, as in 2/1.5"),
    "cp_style": ({style: style for style in ("ring", "allgather")}.get, "ring or allgather"),
    "lm_head": (_LM_HEADS.get, "auto, dp_rank or stage"),
    "dispatch": ({mode: mode for mode in ("auto", "gather", "a2a")}.get, "auto, gather or a2a"),
}
"""Parser (which returns None for an invalid text) and description of the legal values of each field; `_SIZE` for the rest."""


def _unknown(name: str, fields: list[str]) -> str:
    nearest = get_close_matches(name.lower().replace("-", "_"), fields, n=1, cutoff=0.5)
    hint = f" (did you mean {nearest[0]}?)" if nearest else ""
    return f"there is no field {name!r}{hint}: the fields are {', '.join(fields)}"


def text_of(value: object) -> str:
    """Returns the text form of one field's value, as `Layout.parse` reads it: ``16/14`` for a tuple, ``true`` for True."""
    if isinstance(value, tuple):
        return _LIST_SEPARATOR.join(text_of(entry) for entry in value)
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)
