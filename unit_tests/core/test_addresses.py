"""Processes meet on one address, and listen on no other."""

import doctest
import os
import socket
from datetime import timedelta

import psutil
import pytest
from torch.distributed import TCPStore

from core.cluster import addresses
from core.cluster.addresses import find_interface, host_store, list_interfaces, listen_at, use_interface_of
from trainers.weight_sync.broadcast import WeightSender

DEBIAN = {"lo": ["127.0.0.1", "::1"], "eth0": ["10.0.0.7", "fe80::1%eth0"], "ib0": ["192.168.3.7", "fd00::7"]}


@pytest.fixture
def no_settings(monkeypatch):
    for name in (*addresses.INTERFACE_VARIABLES, "VLLM_HOST_IP"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    return monkeypatch


def test_examples():
    assert doctest.testmod(addresses).failed == 0


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("192.168.3.7", "ib0"),
        ("fd00:0::0007", "ib0"),
        ("fe80::1", "eth0"),
        ("127.0.0.1", "lo"),
        ("127.0.1.1", "lo"),
        ("::1", "lo"),
        ("10.0.0.70", None),
    ],
)
def test_the_interface_is_the_one_that_holds_the_address(address, name):
    assert find_interface(address, DEBIAN) == name


def test_on_loopback_every_library_stays_there(no_settings):
    no_settings.setenv("NCCL_SOCKET_IFNAME", "eth7")
    use_interface_of("127.0.0.1")
    name = find_interface("127.0.0.1", list_interfaces())
    assert [os.environ[variable] for variable in addresses.INTERFACE_VARIABLES] == [name, f"={name}", name]
    assert os.environ["VLLM_HOST_IP"] == "127.0.0.1"


def test_between_machines_it_follows_the_address_and_user_settings_stay(no_settings):
    no_settings.setattr(addresses, "list_interfaces", lambda: DEBIAN)
    no_settings.setenv("NCCL_SOCKET_IFNAME", "ib0")
    use_interface_of("10.0.0.7")
    assert [os.environ[variable] for variable in addresses.INTERFACE_VARIABLES] == ["eth0", "ib0", "eth0"]
    assert os.environ["VLLM_HOST_IP"] == "10.0.0.7"


def test_an_address_that_no_interface_holds_changes_nothing(no_settings):
    no_settings.setattr(addresses, "list_interfaces", lambda: DEBIAN)
    use_interface_of("203.0.113.9")
    assert not any(variable in os.environ for variable in (*addresses.INTERFACE_VARIABLES, "VLLM_HOST_IP"))


def addresses_of(port: int) -> set[str]:
    """Where this process listens at `port`."""
    found = psutil.Process().net_connections("inet")
    return {one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN and one.laddr.port == port}


def test_a_store_listens_on_its_address_only():
    timeout = timedelta(seconds=20)
    store = host_store("127.0.0.1", timeout=timeout)
    TCPStore("127.0.0.1", store.port, is_master=False, timeout=timeout).set("key", "value")
    assert store.get("key") == b"value"
    assert addresses_of(store.port) == {"127.0.0.1"}


def test_the_sender_of_weights_does_so_too():
    sender = WeightSender(timeout_s=20.0)
    assert addresses_of(sender.open("127.0.0.1")) == {"127.0.0.1"}


def test_an_address_of_another_machine_is_listened_for_everywhere():
    with listen_at("203.0.113.9") as listener:
        assert listener.getsockname()[0] == "0.0.0.0"


def test_a_port_that_is_taken_is_an_error():
    with listen_at("127.0.0.1") as first, pytest.raises(OSError, match="in use"):
        listen_at("127.0.0.1", first.getsockname()[1])
    assert isinstance(first, socket.socket)
