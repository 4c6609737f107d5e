"""Fill one rank's parameters from a checkpoint, strictly: every parameter filled, every tensor of the file accounted for.

Nothing is copied before everything has been checked, so a refusal leaves no half-filled model behind.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from actors.model.checkpoint.source import TensorSource, ignorable
from placement.layout import Layout
from placement.mesh import coords
from placement.model_spec import ModelError, ModelSpec
from placement.pieces import Parameter
from placement.shards import Shard, parameters, shard

Progress = Callable[[int, int], None]
"""Told (bytes filled, bytes in all) of the rank's parameters."""


def load(
    decoder_parameters: Mapping[str, Tensor],
    spec: ModelSpec,
    own: Shard,
    source: TensorSource,
    progress: Progress | None = None,
) -> None:
    """Fill the parameters of the rank that holds `own`, in place, cast to each parameter's own type; padding rows are zero.

    `decoder_parameters` are the tensors to fill, by the names of `placement.shards.parameters`, on any device.
    Raises `ModelError` where the model, the table and the checkpoint do not agree on a name or a shape.
    """
    table = list(parameters(spec, own))
    _check_parameters(decoder_parameters, table)
    _check_tensors(source, spec, own, table)
    total = sum(decoder_parameters[parameter.name].nbytes for parameter in table)
    done = 0
    for parameter in table:
        target = decoder_parameters[parameter.name]
        _fill(target, parameter, source)
        done += target.nbytes
        if progress is not None:
            progress(done, total)


@torch.no_grad()
def _fill(target: Tensor, parameter: Parameter, source: TensorSource) -> None:
    """Copy each piece to its place; what no piece covers is padding."""
    parts = [target.narrow(piece.dim, piece.at, len(piece.take)) for piece in parameter.pieces]
    if sum(part.numel() for part in parts) < target.numel():
        target.zero_()
    for piece, part in zip(parameter.pieces, parts, strict=True):
        if part.numel():
            source.fill(piece.source, piece.dim, piece.take, part)


def _check_parameters(given: Mapping[str, Tensor], table: list[Parameter]) -> None:
    """The decoder's parameters are those of the table, by name and shape, and have memory to fill."""
    shapes = {parameter.name: parameter.shape for parameter in table}
    if given.keys() != shapes.keys():
        raise ModelError(
            "the model and the table of its parameters differ: "
            f"only in the model {_some(given.keys() - shapes.keys())}; only in the table {_some(shapes.keys() - given.keys())}"
        )
    for name, shape in shapes.items():
        if tuple(given[name].shape) != shape:
            raise ModelError(f"parameter {name} has shape {list(given[name].shape)}, but the table says {list(shape)}")
        if given[name].is_meta:
            raise ModelError(f"parameter {name} is on the meta device: it has no memory to load into")


def _check_tensors(source: TensorSource, spec: ModelSpec, own: Shard, table: list[Parameter]) -> None:
    """The checkpoint has what this rank needs, in the right shapes, and nothing that no rank needs."""
    names = source.names()
    whole = shard(spec, Layout(), coords(Layout(), 0))
    used = {piece.source for parameter in parameters(spec, whole) for piece in parameter.pieces}
    unexpected = {name for name in names - used if not ignorable(name, spec)}
    if unexpected:
        raise ModelError(
            f"{source.location}: {len(unexpected)} tensors that a {spec.family} model with these settings has no place "
            f"for: {_some(unexpected)}"
        )
    pieces = {piece.source: piece for parameter in table for piece in parameter.pieces}
    missing = pieces.keys() - names
    if missing:
        raise ModelError(f"{source.location}: {len(missing)} tensors of {_part(own)} are missing: {_some(missing)}")
    for name, piece in pieces.items():
        shape = source.shape(name)
        if shape != piece.source_shape:
            raise ModelError(
                f"{source.where(name)}: tensor {name} has shape {list(shape)}, but the model's settings make it "
                f"{list(piece.source_shape)}"
            )


def _part(own: Shard) -> str:
    """The part of the model a rank holds, in words."""
    stage = {(True, True): "the only stage", (True, False): "the first stage", (False, True): "the last stage"}
    return f"layers {own.layers.start}-{own.layers.stop - 1} ({stage.get((own.first_stage, own.last_stage), 'a middle stage')})"


def _some(names: Collection[str]) -> str:
    """The first few of some names, in order."""
    shown = ", ".join(sorted(names)[:3]) or "none"
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
