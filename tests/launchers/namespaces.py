"""Several hosts on one machine: network namespaces, joined by a bridge in one more."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass
class Hosts:
    """Namespaces with an address each, on a network of their own."""

    names: list[str]

    def address(self, host: int) -> str:
        """Its address on the network."""
        return f"10.77.0.{host + 1}"

    def on(self, host: int, *words: str) -> list[str]:
        """A command as it is run on a host."""
        return ["ip", "netns", "exec", self.names[host], *words]

    def cut(self, host: int) -> None:
        """Pulls the cable."""
        subprocess.run(["ip", "-n", self.names[host], "link", "set", "eth0", "down"], check=True)

    def drop(self, host: int, *, to: int) -> None:
        """Has every packet from a host to another go to a machine that does not exist."""
        words = ["neigh", "replace", self.address(to), "lladdr", "02:00:00:00:00:99"]
        words += ["dev", "eth0", "nud", "permanent"]
        subprocess.run(["ip", "-n", self.names[host], *words], check=True)


@contextmanager
def hosts(count: int, *, delay_ms: int = 0) -> Iterator[Hosts]:
    """Makes hosts, and takes them away; a packet between two takes `delay_ms` longer. Skips the
    test where the kernel forbids it.
    """
    made = Hosts([f"distcheck-{os.getpid()}-{number}" for number in range(count)])
    try:
        for name in made.names:
            if not _works("ip", "netns", "add", name):
                pytest.skip("network namespaces cannot be made here: no ip, or no permission")
        with _slow_network(made, delay_ms) if delay_ms else _bridge(made):
            for number, name in enumerate(made.names):
                address = f"{made.address(number)}/24"
                _must("ip", "-n", name, "addr", "add", address, "dev", "eth0")
                _must("ip", "-n", name, "link", "set", "eth0", "up")
                _must("ip", "-n", name, "link", "set", "lo", "up")
            yield made
    finally:
        for name in made.names:
            _works("ip", "netns", "del", name)


@contextmanager
def _bridge(made: Hosts) -> Iterator[None]:
    hub = f"distcheck-{os.getpid()}-hub"
    run = ["ip", "-n", hub]
    try:
        _must("ip", "netns", "add", hub)
        if not _works(*run, "link", "add", "bridge", "type", "bridge"):
            pytest.skip("a bridge cannot be made in a network namespace here")
        _must(*run, "link", "set", "bridge", "up")
        for number, name in enumerate(made.names):
            ends = [f"port{number}", "type", "veth", "peer", "name", "eth0", "netns", name]
            _must(*run, "link", "add", *ends)
            _must(*run, "link", "set", f"port{number}", "master", "bridge", "up")
        yield
    finally:
        _works("ip", "netns", "del", hub)


@contextmanager
def _slow_network(made: Hosts, delay_ms: int) -> Iterator[None]:
    words = [sys.executable, str(Path(__file__).with_name("slow_switch.py")), str(delay_ms)]
    switch = subprocess.Popen([*words, *made.names], stdout=subprocess.PIPE, text=True)
    try:
        assert switch.stdout is not None
        if switch.stdout.readline().strip() != "ready":
            pytest.skip("a TAP device cannot be made in a network namespace here")
        for name in made.names:
            _must("ip", "-n", name, "link", "set", "eth0", "mtu", "60000")
        yield
    finally:
        switch.kill()
        switch.wait()


def _must(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def _works(*words: str) -> bool:
    try:
        return subprocess.run(words, capture_output=True).returncode == 0
    except OSError:
        return False
