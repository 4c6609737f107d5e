"""The commands that start Ray on a machine: environment, limits, ports, resources and labels.

Every port that another machine must reach is fixed, so that firewalls can be configured::

    6379 head (GCS)   8265 dashboard and `serve deploy`   8076 object manager   8077 node manager   8000 HTTP
    10002-19999       workers
    ephemeral ports   connections between ranks, including UCX, which carries KV between pools
                      (/proc/sys/net/ipv4/ip_local_port_range, by default 32768-60999)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cluster.nodes.topology import POOL_LABEL
from placement.nodes.fleet import Machine

HEAD_PORT = 6379
DASHBOARD_PORT = 8265
LABELS_FILE = "/etc/shardwright/labels"
"""The file with a machine's own labels, as in ``rack=r1,zone=z1``. A machine without the file has none."""

ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",  # the token is in ~/.ray/auth_token of every machine
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
HEAD_ENVIRONMENT = {
    # With these values a disconnected machine counts as lost after about 8 s; by default it takes up to a minute.
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "serve_app.openai.proxy.in_front",
}


OWN_MACHINES = {
    # The v2 autoscaler counts the head as a worker if machines are given by address, and so never starts the last one.
    "RAY_enable_autoscaler_v2": "0",
}


def head_command(machine: Machine, more: Mapping[str, str] | None = None) -> str:
    """Returns the shell command that starts Ray's head node, which has no slots for ranks.

    `machine` gives the size of its object store; `more` are further environment variables.
    """
    settings = [
        *(f"{name}={value}" for name, value in {**ENVIRONMENT, **HEAD_ENVIRONMENT, **(more or {})}.items()),
        "ray start --head",
        f"--port={HEAD_PORT}",
        "--num-cpus=0",
        "--num-gpus=0",
        f"--dashboard-port={DASHBOARD_PORT}",
        f"--object-store-memory={machine.object_store_bytes}",
        *_NODE_PORTS,
        "--autoscaling-config=~/ray_bootstrap_config.yaml",
    ]
    return f"ulimit -n 65536; {' '.join(settings)}"


def worker_command(machine: Machine, kept: Mapping[str, Sequence[str]] | None = None) -> str:
    """Returns the shell command that starts a Ray worker node, with the slots of `machine` and the labels in the machine's
    `LABELS_FILE`. It expects the head's address in the variable ``RAY_HEAD_IP``.

    `kept` contains, by pool, the machines (addresses or host names) that are reserved for it. All workers run the same command,
    in which each machine looks up its own pool.
    """
    settings = [
        *(f"{name}={value}" for name, value in ENVIRONMENT.items()),
        f"ray start --address=$RAY_HEAD_IP:{HEAD_PORT}",
        f"--num-cpus={machine.ray_cpus}",
        f"--num-gpus={machine.slots if machine.kind == 'cuda' else 0}",
        f"--object-store-memory={machine.object_store_bytes}",
        *_NODE_PORTS,
        f'--labels="{_POOL_AND_LABELS if kept else _LABELS}"',
    ]
    return f"ulimit -n 65536; {_look_up(kept) if kept else ''}{' '.join(settings)}"


def _look_up(kept: Mapping[str, Sequence[str]]) -> str:
    """Returns shell code that sets the variable POOL to the pool label of the machine it runs on, or to nothing."""
    cases = ((pool, "|".join(f'*" {name} "*' for name in names)) for pool, names in kept.items())
    lines = " ".join(f"{names}) POOL={POOL_LABEL}={pool};;" for pool, names in cases)
    return f'POOL=; case " $(hostname -I) $(hostname) " in {lines} esac; '


_LABELS = f"$(cat {LABELS_FILE} 2>/dev/null)"
_POOL_AND_LABELS = f"$(echo $POOL $(cat {LABELS_FILE} 2>/dev/null) | tr ' ' ,)"
"""The pool label and the machine's own labels, with a comma between them only if both exist."""


_NODE_PORTS = ("--object-manager-port=8076", "--node-manager-port=8077", "--min-worker-port=10002", "--max-worker-port=19999")
