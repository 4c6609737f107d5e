"""Command-line options made from the fields of a pydantic model, which alone holds their names, types, defaults and help texts.

    class ServeArgs:                                  shardwright serve --help
        step_timeout_s: Seconds = 60.0           ──→  --step-timeout  <float>  Seconds after which … [default: 60.0]
        \"""Seconds after which …\"""

An option is named after its field, with dashes, without the unit ``_s``, and in the singular if it may be given several times.
Values that typer cannot check (sizes such as ``2GiB``, choices, bounds) reach typer as text or as a number; the model checks
them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from placement.cost.units import parse_size, size_text

Args = TypeVar("Args", bound=BaseModel)

FORMER_FLAGS = {"threads_per_rank": "--threads"}
"""Former names of options, which are still accepted."""

_ARGUMENT = "model"
"""The field that is a positional argument."""
_CONTEXT = "context_of_options"


def admits(model: type[Args], leave_out: Collection[str] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Returns a decorator for a command whose first parameter is an instance of `model`, which it fills from the command line.

    The command line has an option for each field of `model` that is not in `leave_out`, and an argument for a field ``model``.
    The command's other parameters are options as typer makes them. Options that are not given are not set in the instance
    (`model_fields_set`). The decorated command raises `pydantic.ValidationError` if a value is not valid.
    """
    fields = {name: field for name, field in model.model_fields.items() if name not in leave_out}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(**values: Any) -> None:
            context = values.pop(_CONTEXT)
            asked = {name: values.pop(name) for name in fields}
            given = {name: value for name, value in asked.items() if _is_given(context, name)}
            command(model.model_validate(given), **values)

        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
        made = [_parameter(name, fields[name], panel) for panel, name in _by_panel(model) if name in fields]
        context = inspect.Parameter(_CONTEXT, inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        every = [context, *made, *(each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own)]
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
        return run

    return decorate


def flag_of(name: str, field: FieldInfo) -> str:
    """Returns the command-line option of the field `field` called `name`: ``--step-timeout`` for ``step_timeout_s``,
    ``--api-key`` for ``api_keys``, which may be given several times."""
    name = name.removesuffix("s") if _is_repeated(field) else name.removesuffix("_s")
    return f"--{name.replace('_', '-')}"


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _by_panel(model: type[BaseModel]) -> Iterator[tuple[str, str]]:
    """Yields every field with the title of the class that declares it, beginning with the fields of `model` itself."""
    seen = set[str]()
    for base in model.__mro__:
        own = inspect.get_annotations(base)
        names = [name for name in own if name in model.model_fields and name not in seen]
        seen.update(names)
        yield from ((str(base.model_config.get("title", "Options")), name) for name in names)  # type: ignore[attr-defined]


def _parameter(name: str, field: FieldInfo, panel: str) -> inspect.Parameter:
    """Returns the parameter from which typer makes the option."""
    text = " ".join((field.description or "").split())
    if name == _ARGUMENT:
        shape: Any = typer.Argument(help=text)
    else:
        flags = (flag_of(name, field), *filter(None, [FORMER_FLAGS.get(name)]))
        shape = typer.Option(*flags, help=text, rich_help_panel=panel, metavar=_metavar(field))
    kind: Any = _plain_type(field)
    kind = kind | None if field.default is None else kind
    default = _default(field)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, shape])


def _plain_type(field: FieldInfo) -> Any:
    """Returns the type for typer. Values that typer cannot parse are text, and the model checks them."""
    kind, _marks = _bare(field)
    if _is_repeated(field):
        return list[str]
    return kind if kind in (bool, int, float) and not _is_size(field) else str


def _default(field: FieldInfo) -> Any:
    """Returns the default as a person would write it."""
    if _is_repeated(field):
        return list(field.default)
    return size_text(field.default).replace(" ", "") if _is_size(field) and field.default else field.default


def _metavar(field: FieldInfo) -> str | None:
    """Returns the choices of a field with a fixed set of values; None leaves the placeholder to typer."""
    kind, _marks = _bare(field)
    return "|".join(get_args(kind)) if get_origin(kind) is Literal else None


def _is_repeated(field: FieldInfo) -> bool:
    return get_origin(_bare(field)[0]) is tuple


def _is_size(field: FieldInfo) -> bool:
    """Whether the field is a number of bytes, written with a unit."""
    return any(getattr(mark, "func", None) is parse_size for mark in _bare(field)[1])


def _bare(field: FieldInfo) -> tuple[Any, list[Any]]:
    """Returns the type without None and `Annotated`, and all its annotations."""
    kind, marks = field.annotation, list(field.metadata)
    while get_origin(kind) is Annotated or type(None) in get_args(kind):
        marks += get_args(kind)[1:] if get_origin(kind) is Annotated else []
        kind = next(each for each in get_args(kind) if each is not type(None))
    return kind, marks
