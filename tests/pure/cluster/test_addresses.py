"""The address of a rank: its node's, or that of the interface which the node's own environment names."""

from __future__ import annotations

import pytest

from actors.rank.addresses import AddressError, interface_of, interfaces, own_address


def test_it_is_the_nodes_unless_the_node_names_an_interface() -> None:
    assert own_address("192.0.2.7", {}) == "192.0.2.7"
    assert own_address("192.0.2.7", {"GLOO_SOCKET_IFNAME": ""}) == "192.0.2.7"
    assert own_address("192.0.2.7", {"GLOO_SOCKET_IFNAME": "lo"}) == "127.0.0.1"
    assert own_address("192.0.2.7", {"GLOO_SOCKET_IFNAME": "nowhere0,lo"}) == "127.0.0.1"


def test_a_name_is_looked_up_where_the_rank_runs() -> None:
    assert own_address("localhost", {}) == "127.0.0.1"
    with pytest.raises(AddressError, match=r"does not know the address of its node, nobody\.invalid"):
        own_address("nobody.invalid", {})


def test_an_interface_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(AddressError, match=r"GLOO_SOCKET_IFNAME=ib7 names no interface .* it has .*lo \(127\.0\.0\.1\)"):
        own_address("192.0.2.7", {"GLOO_SOCKET_IFNAME": "ib7"})


def test_the_interface_of_an_address() -> None:
    assert interfaces()["lo"] == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.7") == ""
