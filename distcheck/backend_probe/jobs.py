"""What the front asks of the processes that probe, and what the first one answers; no torch."""

from typing import Any

import msgspec

from distcheck.backend_probe.records import Probe
from distcheck.worlds.jobs import STORE, Job
from distcheck.worlds.rendezvous import Rendezvous


class LookRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Whether `world` ranks could use a backend (a name, or where its `register` is) here."""

    backend: str
    device: str
    world: int


class Availability(msgspec.Struct, frozen=True, kw_only=True):
    """The answer: `missing` is empty where it can be used."""

    device: str
    missing: str
    environment: dict[str, Any]


class ProbeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank probes.

    `first` is the number of `probes[0]` in the whole sweep. Every rank says a `RankResult` per
    probe. It returns early where a fresh world has to go on. `refused` are the keys of the probes
    that worlds before this one have found refused, each with the reason.
    """

    rendezvous: Rendezvous
    device: str
    first: int
    probes: tuple[Probe, ...]
    refused: dict[str, str]


LOOK = Job("distcheck.backend_probe.availability:look", LookRequest, Availability)
PROBE = Job("distcheck.backend_probe.rank:probe", ProbeRequest, type(None), (STORE,))
