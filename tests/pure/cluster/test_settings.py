"""What a deployment takes over of the shell it is made from."""

from __future__ import annotations

from cluster.replica.settings import shared_variables


def test_only_what_is_the_same_on_every_node_is_taken_over() -> None:
    shell = {
        "NCCL_DEBUG": "INFO",
        "NCCL_SOCKET_IFNAME": "eth7",
        "GLOO_SOCKET_IFNAME": "eth7",
        "HF_TOKEN": "secret",
        "PATH": "/bin",
    }
    assert shared_variables(shell) == {"NCCL_DEBUG": "INFO"}
    assert shared_variables({}) == {}
