"""Writes the overlays here and the files in cluster/configs anew: ``python k8s/render.py``. A test holds them to this."""

from __future__ import annotations

from pathlib import Path

from cluster.render.kuberay import kustomization
from serve_app.commands.render_args import RenderArgs
from serve_app.commands.render_command import deployment_of, files_of
from serve_app.commands.render_text import text_of

ROOT = Path(__file__).resolve().parents[1]
_GPUS = {"device": "cuda", "slots": 8, "cpus": 96, "memory": "1024GiB", "image": "shardwright:cuda"}

OVERLAYS = {
    "cpu-demo": (
        "The built-in model on two CPU slots of one machine.",
        {"model": "smollm2-135m", "layout": "tp=2", "slots": 2, "memory": "8GiB", "image": "shardwright:cpu", "spare": 1},
    ),
    "single-node-8gpu": (
        "A 70B model over the eight GPUs of one machine. No machine is spare: a change of the cluster deletes it first.",
        {"model": "/models/Llama-3.3-70B-Instruct", "layout": "tp=8", **_GPUS},
    ),
    "multi-node-pp": (
        "A 405B model in two stages of eight GPUs, twice: each replica is a group of two machines that come and go together.",
        {"model": "/models/Llama-3.1-405B-Instruct", "layout": "tp=8,pp=2,replicas=2", "spare": 4, **_GPUS},
    ),
    "moe-ep16": (
        "A model of 128 experts, 8 on each of sixteen GPUs: one group of two machines on one fast network.",
        {"model": "/models/Qwen3-235B-A22B", "layout": "tp=8,cp=2,ep=16", **_GPUS},
    ),
    "pd-pools": (
        "Prompts by two replicas, a machine of eight GPUs each; their tokens by one over sixteen, a group of two machines.",
        {"model": "/models/Qwen3-235B-A22B", "prefill": "tp=4,cp=2,ep=8*2", "decode": "tp=4,attn_dp=4,ep=16*1", **_GPUS},
    ),
}
"""What each is, and how it is asked for."""

_CLOUD_GPUS = {**_GPUS, "model": "Qwen/Qwen3-32B", "layout": "tp=8,pp=2", "target": "ray-up", "name": "shardwright"}
CONFIGS = {
    "local": (
        "Machines of your own, by address: put yours in place of these, or let `shardwright render` write the file.",
        {
            "model": "smollm2-135m",
            "layout": "tp=2,pp=2",
            "target": "ray-up",
            "slots": 2,
            "memory": "8GiB",
            "head": "192.0.2.10",
            "workers": ("192.0.2.11", "192.0.2.12"),
        },
    ),
    "aws": (
        "Two machines of eight H100 on AWS, in one zone.",
        {**_CLOUD_GPUS, "provider": "aws", "instance": "p5.48xlarge", "region": "us-west-2", "zone": "us-west-2a"},
    ),
    "gcp": (
        "Two machines of eight H100 on GCP, in one zone. Put your project in place of my-project.",
        {
            **_CLOUD_GPUS,
            "provider": "gcp",
            "instance": "a3-highgpu-8g",
            "region": "us-central1",
            "zone": "us-central1-a",
            "project": "my-project",
        },
    ),
}
_UP = """\
#
#     ray get-auth-token --generate      # once
#     ray up {path}
#     serve deploy serve.yaml            # on the head
"""


def texts() -> dict[str, str]:
    """Every file by its path below the repository."""
    found = {}
    for name, (about, fields) in OVERLAYS.items():
        args = RenderArgs.model_validate({"target": "kuberay", "name": name, **fields})
        files = files_of(args, deployment_of(args))
        listed = {**kustomization(name, [each for each in files if each != "kustomization.yaml"], "../../base")}
        files["kustomization.yaml"] = [{**listed, "namespace": "shardwright"}]
        for file, documents in files.items():
            head = f"# {about}\n# Written by k8s/render.py.\n" if file in ("kustomization.yaml", "service.yaml") else ""
            found[f"k8s/overlays/{name}/{file}"] = head + text_of(documents)
    for name, (about, fields) in CONFIGS.items():
        args = RenderArgs.model_validate(fields)
        path = f"cluster/configs/{name}.yaml"
        config = files_of(args, deployment_of(args))["cluster.yaml"]
        found[path] = f"# {about}\n{_UP.format(path=path)}# Written by k8s/render.py.\n" + text_of(config)
    return found


if __name__ == "__main__":
    for path, text in texts().items():
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_text(text)
        print(path)
