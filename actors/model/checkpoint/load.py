"""Loads one rank's parameters from a checkpoint, strictly: every parameter is filled, every tensor of the file accounted for.

Nothing is copied before everything has been checked, so a refusal leaves no half-filled model behind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from actors.model.checkpoint.source import TensorSource
from placement.checkpoint.directory.tensor_directory import check, some
from placement.model.spec import ModelError, ModelSpec
from placement.ownership.shard import Shard
from placement.ownership.shards import parameters
from placement.ownership.weight_slices import Parameter, WeightSlice

LoadProgress = Callable[[int, int], None]
"""A callback that receives (bytes filled, bytes in all) of the rank's parameters."""

OnFilled = Callable[[Parameter], None]
"""A callback that receives each parameter once it is filled."""


def load(
    decoder_parameters: Mapping[str, Tensor],
    spec: ModelSpec,
    own: Shard,
    source: TensorSource,
    progress: LoadProgress | None = None,
    on_filled: OnFilled = lambda parameter: None,
) -> None:
    """Fill the parameters of the rank that holds `own` in place from `source`, cast to the dtype of each parameter. Padding
    rows become zero. After each parameter, `progress` is called with (bytes filled, bytes in all), and `on_filled` with the
    parameter.

    `decoder_parameters` are the tensors to fill, on any device, by the names of `placement.ownership.shards.parameters`. Raises
    `ModelError`, before anything is filled, if the model, the shard table and the checkpoint disagree on a name or a shape, or
    a parameter is on the meta device.
    """
    table = list(parameters(spec, own))
    _check_parameters(decoder_parameters, table)
    check(source.directory, spec, own)
    total = sum(decoder_parameters[parameter.name].nbytes for parameter in table)
    done = 0
    for parameter in table:
        target = decoder_parameters[parameter.name]
        _fill(target, parameter, source)
        done += target.nbytes
        on_filled(parameter)
        if progress is not None:
            progress(done, total)


@torch.no_grad()
def _fill(target: Tensor, parameter: Parameter, source: TensorSource) -> None:
    """Copy each slice to its place. Elements that no slice covers are padding."""
    parts = [landing(target, weight_slice) for weight_slice in parameter.slices]
    if sum(part.numel() for part in parts) < target.numel():
        target.zero_()
    for weight_slice, part in zip(parameter.slices, parts, strict=True):
        if part.numel():
            source.fill(weight_slice.source, weight_slice.dim, weight_slice.take, part, weight_slice.source_slot)


def landing(target: Tensor, weight_slice: WeightSlice) -> Tensor:
    """Return the view of the parameter `target` that `weight_slice` fills, in the slice's shape."""
    matrix = target if weight_slice.slot is None else target[weight_slice.slot]
    matrix = matrix.transpose(0, 1) if weight_slice.transposed else matrix
    return matrix.narrow(weight_slice.dim, weight_slice.at, len(weight_slice.take))


def _check_parameters(given: Mapping[str, Tensor], table: list[Parameter]) -> None:
    """Check that the decoder's parameters are those of the table, by name and shape, and have memory to fill."""
    shapes = {parameter.name: parameter.shape for parameter in table}
    if given.keys() != shapes.keys():
        raise ModelError(
            "the model and the table of its parameters differ: "
            f"only in the model {some(given.keys() - shapes.keys())}; only in the table {some(shapes.keys() - given.keys())}"
        )
    for name, shape in shapes.items():
        if tuple(given[name].shape) != shape:
            raise ModelError(f"parameter {name} has shape {list(given[name].shape)}, but the shard table has {list(shape)}")
        if given[name].is_meta:
            raise ModelError(f"parameter {name} is on the meta device: it has no memory to load into")
