"""``shardwright render``: write the deployment files for a layout and a kind of machine."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from cluster.render.kuberay import Cloud, kustomization, manifests
from cluster.render.ray_up import cloud_cluster, local_cluster
from cluster.render.serve_file import Deployment, ReplicaPool, serve_file
from placement.checkpoint import header
from placement.cost.memory import rank_memories
from placement.layout.layout import Layout, LayoutError
from placement.legality.check import require
from placement.nodes.fleet import Machine, fleet
from serve_app.commands.render_args import RenderArgs
from serve_app.commands.render_text import Files, text_of, write
from serve_app.deployment.catalog import resolve
from serve_app.deployment.deployment_names import IMPORT_PATH, INGRESS, POOL_OF
from serve_app.deployment.pools import layouts as layouts_of
from serve_app.deployment.pools import service

_OF_A_MACHINE = ("slots", "cpus", "memory", "accelerator")


def run_render(args: RenderArgs) -> None:
    """Write the rendered files into the folder ``args.out``, or print them if it is None.

    Raises what `render` does; exits with 2 if the folder cannot be written.
    """
    files = render(args)
    if args.out is None:
        typer.echo("---\n".join(text_of(documents) for documents in files.values()), nl=False)
        return
    try:
        write(files, args.out)
    except OSError as error:
        print(f"error: --out {args.out}: {error.strerror}: it must be a folder that can be created or written", file=sys.stderr)
        raise SystemExit(2) from error


def render(args: RenderArgs) -> Files:
    """Returns every file by its name, as plain documents for YAML. Reads only the headers of the model.

    Raises `ModelError` if the model cannot be read, or its KV not be handed off between pools, and `LayoutError` if a layout is
    illegal for it, or the machines do not fit or are not all given. Also raises what `deployment_of` and `files_of` do.
    """
    layouts = layouts_of(args)
    spec = header.read(resolve(args.model, header_only=True).path)
    for layout in layouts.values():
        require(layout, spec)  # before the machines, whose number is computed for a legal layout
    _check_paths(args)
    service(args, args.device, header_only=True)  # raises what `serve` would raise on the machines
    deployment = deployment_of(args)
    for pool in deployment.pools:
        require(pool.layout, spec, pool.fleet.cluster)
        if args.target == "kuberay":
            pool.fleet.require_memory(sum(rank.weight_bytes for rank in rank_memories(spec, pool.layout)))
    return files_of(args, deployment)


def _check_paths(args: RenderArgs) -> None:
    """Raises `LayoutError` for a path that means nothing on the machines, or that the target decides."""
    for name, path in (("disk_cache", args.disk_cache), ("api_keys_file", args.api_keys_file)):
        if path is not None and not Path(path).is_absolute():
            raise LayoutError(f"{name}={str(path)!r} is for other machines: give an absolute path")
    if args.target == "kuberay" and args.api_keys_file is not None:
        raise LayoutError("api_keys_file cannot be rendered for kuberay, which mounts a secret with the keys: leave it out")


def deployment_of(args: RenderArgs) -> Deployment:
    """Returns the requested deployment, on as many machines as it needs. Does not read the model.

    Raises `LayoutError` if a layout cannot be parsed, does not fit the machines, or the target cannot have these machines, and
    `pydantic.ValidationError` for a bad value in the differences of a pool's machines (``args.prefill_machine`` and the like).
    """
    layouts = layouts_of(args)
    args = _roomy(args, layouts) if args.target == "serve" else args
    arguments = {name: POOL_OF[name] if _in_pools(args) else "layout" for name in layouts}
    machines = {name: _machine_of(args, argument) for name, argument in arguments.items()}
    _check_machines(args, machines)
    return Deployment(
        name=args.name,
        model=args.model_path or args.model,
        pools=tuple(
            ReplicaPool(name=name, argument=arguments[name], layout=layout, fleet=fleet(layout, machines[name]))
            for name, layout in layouts.items()
        ),
        import_path=IMPORT_PATH,
        ingress=INGRESS,
        settings=args.settings,
    )


def _roomy(args: RenderArgs, layouts: Mapping[str, Layout]) -> RenderArgs:
    """Returns the arguments with machines large enough for the layouts. A Serve file lists no machines, so their size must not
    cause an error."""
    slots = max(args.slots, *(layout.tp for layout in layouts.values()))
    return args.model_copy(update={"slots": slots, "cpus": max(args.cpus or slots, slots)})


def _in_pools(args: RenderArgs) -> bool:
    return bool(args.prefill or args.decode or args.mixed)


def _machine(args: RenderArgs) -> Machine:
    return Machine(
        slots=args.slots,
        kind=args.device,
        cpus=args.cpus or args.slots,
        memory_bytes=args.memory,
        accelerator=args.accelerator,
    )


def _machine_of(args: RenderArgs, pool: str) -> Machine:
    """Returns the machine of a pool: the common one, with the pool's differences. Raises `LayoutError`, or `ValidationError`
    for a bad value."""
    text = _unlike(args).get(pool, "")
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    asked = {name.strip(): value.strip() for name, _, value in pairs}
    if not asked.keys() <= set(_OF_A_MACHINE):
        raise LayoutError(f"--{pool}-machine {text!r} must be some of {', '.join(f'{name}=...' for name in _OF_A_MACHINE)}")
    if len(asked) < len(pairs):
        names = [name.strip() for name, _, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise LayoutError(f"--{pool}-machine {text!r} has {twice} {names.count(twice)} times: give it once")
    return _machine(RenderArgs.model_validate({**args.model_dump(exclude_unset=True), **asked}))


def _unlike(args: RenderArgs) -> dict[str, str]:
    """Returns the given machine differences by pool."""
    texts = {"prefill": args.prefill_machine, "decode": args.decode_machine, "mixed": args.mixed_machine}
    return {pool: text for pool, text in texts.items() if text}


def _check_machines(args: RenderArgs, machines: dict[str, Machine]) -> None:
    """Raises `LayoutError` if the pools cannot have these machines."""
    nobodys = [f"--{pool}-machine" for pool in _unlike(args) if not getattr(args, pool)]
    if nobodys:
        raise LayoutError(f"{' and '.join(nobodys)} is of a pool that there is not; --slots and the like are of all machines")
    for machine in machines.values() if _in_pools(args) and args.target != "serve" else ():
        machine.require_room_for_transfers()
    if len(set(machines.values())) == 1:
        return
    if args.target == "ray-up":
        sizes = " and ".join(str(machine.slots) for machine in machines.values())
        raise LayoutError(f"ray up starts all workers alike, but the pools' machines differ ({sizes} slots, ...): use kuberay")
    if args.spare:
        raise LayoutError(
            f"--spare {args.spare} counts machines of one kind, but the pools have more, and an upgrade needs all"
        )


def files_of(args: RenderArgs, deployment: Deployment) -> Files:
    """Returns the files of ``args.target`` for `deployment`, by name.

    Raises `LayoutError` for a name, address, image or label that the target would reject, and if machines, instance type,
    region, zone or project are missing for ``ray-up``.
    """
    if args.target == "serve":
        return {"serve.yaml": [serve_file(deployment, ingress_on_head=True)]}
    if args.target == "kuberay":
        cloud = Cloud(image=args.image, spare=args.spare, gateway_class=args.gateway_class)
        files = manifests(deployment, cloud)
        return {"kustomization.yaml": [kustomization(deployment.name, list(files))], **files}
    return {"cluster.yaml": [_ray_up(args, deployment)], "serve.yaml": [serve_file(deployment, ingress_on_head=True)]}


def _ray_up(args: RenderArgs, deployment: Deployment) -> dict[str, Any]:
    if args.provider == "local":
        need = deployment.machines
        if not args.head or len(args.workers) < need:
            raise LayoutError(
                f"{deployment} needs {need} worker machines of {args.slots} slots and a head beside them, but --head is "
                f"{args.head!r} and --worker was given {len(args.workers)} times"
            )
        setup = {"setup": args.setup} if args.setup else {}
        return local_cluster(deployment, args.head, args.workers, args.ssh_user, args.ssh_key, **setup)
    wanted: Mapping[str, str] = {"instance": args.instance, "region": args.region, "zone": args.zone}
    if args.provider == "gcp":
        wanted = {**wanted, "project": args.project}
    missing = [f"--{name}" for name, value in wanted.items() if not value]
    if missing:
        raise LayoutError(f"machines of {args.provider} need {', '.join(missing)}")
    place = {"region": args.region, "availability_zone": args.zone}
    place |= {"project_id": args.project} if args.provider == "gcp" else {}
    head = {"aws": "m7i.large", "gcp": "n2-standard-2"}[args.provider]
    return cloud_cluster(deployment, args.provider, args.instance, head, place)
