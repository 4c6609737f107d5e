"""The parallel layout: one frozen value that says how many ranks hold what.

    stage_ranks = attn_dp * cp * tp = moe_dp * ep * moe_tp
    world       = pp * stage_ranks            (ranks of one replica)
    devices     = replicas * world

Text form, used by every command, config and error: ``tp=2,pp=2`` (fields not named are 1). `moe_tp` is what `moe_dp` and `ep`
leave of a stage's ranks, so it need not be named: ``tp=2`` is moe_tp=2, ``tp=16,ep=8`` too.
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
    """A layout text that cannot be read, or a layout that breaks rules. ``str()`` is the whole message."""

    code = "bad_layout"


class Layout(BaseModel):
    """Parallel sizes of a deployment. Every size counts ranks (devices) and defaults to 1 (or off), `moe_tp` to what is left.

    A copy with other sizes is a new `Layout` of `asked`: ``model_copy`` would keep the old `moe_tp`.
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
        """What `moe_dp` and `ep` leave of a stage's ranks: the only `moe_tp` that fits, where they divide them."""
        return max(1, self.stage_ranks // (self.moe_dp * self.ep))

    @property
    def asked(self) -> dict[str, Any]:
        """The fields that say something: those not at their default. ``Layout(**layout.asked) == layout``."""
        usual = {name: field.default for name, field in type(self).model_fields.items()} | {"moe_tp": self.rest_for_moe_tp}
        return {name: getattr(self, name) for name in usual if getattr(self, name) != usual[name]}

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage."""
        return self.attn_dp * self.cp * self.tp

    @property
    def world(self) -> int:
        """Ranks of one replica."""
        return self.pp * self.stage_ranks

    @property
    def devices(self) -> int:
        """Ranks of the whole deployment."""
        return self.replicas * self.world

    @property
    def kv_owners(self) -> int:
        """Ranks over which the KV blocks of one sequence are split (see `placement.ownership.context`)."""
        return self.cp * self.dcp

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the text form, for example ``tp=2,pp=2,stage_layers=16/14``; empty text is the single rank.

        Raises `LayoutError` with everything that is wrong with the text.
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
        """The shortest text form: fields at their default are left out; the single rank is ``tp=1``."""
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
"""How each field is read (None: unreadable), and what it must be. The others are `_SIZE`."""


def _unknown(name: str, fields: list[str]) -> str:
    nearest = get_close_matches(name.lower().replace("-", "_"), fields, n=1, cutoff=0.5)
    hint = f" (did you mean {nearest[0]}?)" if nearest else ""
    return f"there is no field {name!r}{hint}: the fields are {', '.join(fields)}"


def text_of(value: object) -> str:
    """The value of one field in the text form."""
    if isinstance(value, tuple):
        return _LIST_SEPARATOR.join(text_of(entry) for entry in value)
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)
