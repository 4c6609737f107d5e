"""The rooms of the four packages, in the order of their imports: a folder may import the folders before it, and no other.

Read from the top, the list is a tour: values first, then decisions, then the maths of a rank, the engine, Ray, and HTTP. The
sentence of a folder is also the first line of its ``__init__.py``.
"""

from __future__ import annotations

ROOMS: dict[str, dict[str, str]] = {
    "placement": {
        "model": "The model specification: sizes, attention kinds and experts of a model, as one frozen value.",
        "layout": "The parallel layout, the rank grid (device mesh), and partitions of layers, heads and columns over ranks.",
        "experts": "Expert-parallel load balancing (EPLB): the expert map, its balance, and moves between maps.",
        "nodes": "Machines, the links between them, and the assignment of placement-group bundles to nodes.",
        "ownership": "Ownership: which rank holds which weight slices, KV blocks and tokens under any layout.",
        "cost": "Cost estimates of a layout before it runs: memory per rank, and the bytes that every collective sends.",
        "legality": "Layout validation: the rules of a legal layout, checked all at once, and the nearest legal alternatives.",
        "checkpoint/directory": "The parts that all checkpoint formats share: typed header fields and a directory of tensors.",
        "checkpoint/hf": "Hugging Face folders: config.json and the headers of safetensors files.",
        "checkpoint/gguf": "GGUF files: their header, tensor names and RoPE scaling.",
        "checkpoint": "Checkpoint readers: model settings and tensors, from the headers of every format.",
        "explain": "Layouts as text and drawings: the rank grid, one layer, traffic, memory and balance.",
    },
    "actors": {
        "wire": "The messages that cross process boundaries: requests, step plans, results, KV and expert reports, settings.",
        "groups": "Collectives among ranks: the `Group` interface, and the groups of a single rank and of threads.",
        "groups/shared_memory": "Collectives among processes of one host, over shared memory.",
        "groups/distributed": "Collectives over torch.distributed: NCCL between GPUs, gloo between CPUs of any hosts.",
        "sampling": "Sampling: each rank has a slice of the vocabulary's logits, and all ranks choose the same token.",
        "model/kernels/native": "Kernels in C++ for CPUs, compiled on the machine that runs them.",
        "model/kernels": "Matrix products, tuned for each device.",
        "model/kv": "The paged KV cache of one rank.",
        "model/step": "State that the layers of one step share: the batch, rotary embeddings, sequence-parallel regions.",
        "model/attention": "The attention interface, and the computations that all devices share: merging, softcaps, sinks.",
        "model/attention/cpu": "Attention on CPU with torch's flash-attention operator.",
        "model/attention/cuda": "Attention on CUDA, with an installed flash-attention package.",
        "model/attention/context": "Context parallelism (CP, DCP): attention over a sequence whose keys lie on several ranks.",
        "model/layers": "The layers of a dense transformer, on one tensor-parallel rank's slice of the weights.",
        "model/latent": "Multi-head latent attention (MLA): its layer, and its naive and absorbed forms.",
        "model/moe": "Mixture of experts (MoE): the router, token dispatch (the expert all-to-all), the experts, combine.",
        "model/checkpoint": "Loads one rank's slices of a checkpoint into its parameters.",
        "model": "The model of one rank: one pipeline stage of the decoder, built from the model's spec and the rank's shard.",
        "kv_transfer": "KV cache from rank to rank of unlike layouts: the KV connector of prefill/decode disaggregation.",
        "kv_offload": "KV offload: KV blocks spilled to host memory and to disk, and fetched back.",
        "engine/kv": "The block manager: allocation and reference counts of KV blocks, and the hashes of the prefix cache.",
        "engine/link": "The links between an engine and its ranks, and from engines to the ingress, over ZeroMQ.",
        "engine/sequences": "The requests in an engine: the waiting queue, tenant fairness, sequences, and token events.",
        "engine/config": "The configuration of one engine (sizes and limits), and the statistics that it reports.",
        "engine/batching": "Composition of step plans: token budgets, chunked prefill and pipeline micro-batches.",
        "engine/disaggregation": "The engine's KV connector: prefill/decode disaggregation (KV transfer) and KV offload.",
        "engine": "The engine: the continuous-batching scheduler, and the loop that sends its step plans to the ranks.",
        "rank": "The worker process of one rank: it receives step plans, runs its part of the model, and returns step results.",
        "verify": "Layout verification: runs a layout beside one rank, and tells whether differences are rounding or a fault.",
    },
    "cluster": {
        "nodes": "What a Ray cluster has: nodes, slots, labels, and measured links.",
        "embedded": "Joins a Ray cluster, or starts one inside the command that needs it.",
        "replica": "One replica on Ray: its placement group, its rank actors, its engine, and its supervision.",
        "render": "Files that bring a layout to machines: for Serve, `ray up` and KubeRay.",
    },
    "serve_app": {
        "text": "Text processing: tokenizers, chat templates, detokenizing and stop strings.",
        "deployment": "The deployment's settings, pools and model files, checked before anything starts.",
        "routing": "Request routing: the backends behind the HTTP endpoint, the pools, and the KV hand-offs between them.",
        "openai/request": "HTTP requests of the OpenAI endpoint: fields, prompts, limits and errors.",
        "openai/response": "HTTP answers of the OpenAI endpoint, whole and streamed.",
        "openai": "The OpenAI-compatible endpoint as a FastAPI application.",
        "": "The composition root of the service.",
        "commands": "The command line: one file for each command.",
    },
}

PACKAGES = {
    "placement": "Layouts: which rank owns which weights, KV heads and experts under a given layout, and what that costs.",
    "actors": "Runs a model: the engine that schedules tokens, and the ranks that compute them.",
    "cluster": "Puts replicas on a Ray cluster and keeps them alive.",
    "serve_app": "The HTTP service on Ray Serve, and the command line.",
}

FORBIDDEN = {
    "placement": {"torch", "ray", "zmq", "fastapi", "transformers"},
    "actors/engine": {"torch", "ray", "fastapi", "transformers"},
    "actors/wire": {"torch", "ray", "zmq", "fastapi", "transformers"},
    "actors/model": {"ray", "zmq", "fastapi", "transformers"},
    "actors": {"ray", "fastapi", "starlette", "transformers"},
    "cluster": {"fastapi", "starlette", "typer", "transformers"},
    "serve_app": {"transformers"},
}
"""Libraries that a folder and all below it never import."""

MOST_FILES = 20
"""Files of one folder at most."""

BANNED_WORDS = (
    *("courier", "librarian", "shelves", "shelf", "greeting", "greetings", "whereabouts", "seat", "seats", "seating", "seated"),
    *("deal", "deals", "dealt", "dealing", "split_hands", "poorest", "heat", "turned_dim", "lane", "lanes", "roster", "duty"),
    *("word_s", "quiet_s", "keeper", "tally", "hand_off", "hand_offs", "handing_over", "hand_over"),
)
"""Words, whole or as a part of an identifier, for which the field has a name: see ``docs/vocabulary.md``."""

ALLOWED = {
    "placement/layout/layout.py": "lane",  # the former value of lm_head, which is read for one version more
    "placement/nodes/links.py": "lanes",  # those of PCIe
    "serve_app/commands/explain_command.py": "seats",  # a key of `explain --json`
    "serve_app/commands/verify_command.py": "keeper",  # of a lighthouse: the text that is verified
}
"""A banned word that a file may have."""
