"""Validation of names, addresses, images and labels in rendered files. Each `LayoutError` names the field and its value."""

from __future__ import annotations

import re
from collections.abc import Sequence

from placement.layout.layout import LayoutError

_LONGEST_NAME = 40
"""Greatest length of a deployment name. KubeRay derives longer names from it, which may have 63 characters at most."""
_NAME = re.compile("[a-z]([-a-z0-9]*[a-z0-9])?")
_HOST = re.compile("[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_IMAGE = re.compile(r"[A-Za-z0-9]\S*")
_LABEL = re.compile("[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")


def require_name(name: str) -> None:
    """Raises `LayoutError` unless `name` is a deployment name that Kubernetes and clouds accept: at most 40 characters of a-z,
    0-9 and '-', beginning with a letter and not ending with '-'."""
    if not _NAME.fullmatch(name) or len(name) > _LONGEST_NAME:
        raise LayoutError(
            f"name {name!r} must be at most {_LONGEST_NAME} of a-z, 0-9 and '-', begin with a letter and not end with '-'"
        )


def require_hosts(head: str, workers: Sequence[str]) -> None:
    """Raises `LayoutError` if the address of the head or of a worker is not a host name or an IPv4 address, or if a machine is
    given twice (in any case of letters)."""
    given = [("--head", head), *(("--worker", worker) for worker in workers)]
    seen: dict[str, str] = {}
    for option, host in given:
        if not _HOST.fullmatch(host):
            raise LayoutError(f"{option} {host!r} must be a host name or an IPv4 address, as in node1.lan or 10.0.0.2")
        if host.lower() in seen:
            raise LayoutError(f"{option} {host!r} is given as {seen[host.lower()]} already: every machine must be another one")
        seen[host.lower()] = option


def require_image(image: str) -> None:
    """Raises `LayoutError` for an invalid container image name: one that is empty, has white space, or does not begin with a
    letter or digit."""
    if not _IMAGE.fullmatch(image):
        raise LayoutError(f"image {image!r} must be a name without spaces, as in registry.lan/shardwright:cuda")


def require_accelerator(accelerator: str | None, kind: str) -> None:
    """Raises `LayoutError` if `accelerator`, a GPU model such as ``NVIDIA-L40S``, is not a valid Kubernetes label value, or is
    given for CPU ranks (`kind` is ``cpu``, not ``cuda``). None is always accepted."""
    if accelerator is None:
        return
    if kind == "cpu":
        raise LayoutError(
            f"accelerator {accelerator!r} is a kind of GPU, but device is cpu: use --device cuda, or leave it out"
        )
    if not _LABEL.fullmatch(accelerator):
        raise LayoutError(
            f"accelerator {accelerator!r} must be at most 63 of A-Z, a-z, 0-9, '-', '_' and '.', begin and end with a letter "
            "or digit, as a node's label nvidia.com/gpu.product does: NVIDIA-L40S"
        )
