"""Ray engine: each part of a matrix runs as a task with one CPU or GPU per rank, in a copy of the
current folder.
"""

import importlib
import logging
import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from typing import Any

from distcheck.addons.engines.running import Ended, LostPart, MatrixTask, run_part
from distcheck.errors import CannotRunError
from distcheck.worlds import scratch

_WITH_TOKENS = (2, 52)  # the first version that authenticates by token
_REACHED_S = 10.0
_LEFT_BEHIND = (".distcheck", ".git", ".venv", "venv", ".tox", "node_modules", "__pycache__")


class RayEngine:
    """Engine that runs parts as tasks of a Ray cluster."""

    code = "a copy of this folder is sent to each worker; other paths must already exist there"

    def __init__(self, ray: Any, work: Sequence[MatrixTask], started: ExitStack) -> None:
        self._ray, self._started = ray, started
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        cpus, gpus = (int(max(n.get(name, 0) for n in nodes)) for name in ("CPU", "GPU"))
        most = max(part.gpus for part in work)
        if most > gpus:
            raise CannotRunError(
                f"a part needs {most} GPUs on one node, but no node of this Ray cluster has more "
                f"than {gpus}; pass a smaller --world"
            )
        task = ray.remote(run_part)
        self._tasks = {
            # Ranks share cores if no node has enough: an infeasible task would wait forever.
            task.options(
                num_cpus=min(part.ranks, cpus), num_gpus=part.gpus, name=f"distcheck {part.name}"
            ).remote(list(part.words), None): part
            for part in work
        }

    def ended(self) -> Iterator[tuple[MatrixTask, Ended | LostPart]]:
        """Wait up to one second, then yield the tasks that have ended."""
        done, _ = self._ray.wait(list(self._tasks), num_returns=1, timeout=1.0)
        for task in done:
            part = self._tasks.pop(task)
            try:
                yield part, self._ray.get(task)
            except self._ray.exceptions.RayError as error:
                yield part, LostPart(f"Ray lost its task: {_first_line(error)}")

    def close(self) -> None:
        for task in self._tasks:
            self._ray.cancel(task, force=True)
        self._started.close()


def start(address: str, work: Sequence[MatrixTask]) -> RayEngine:
    """Start tasks on the Ray cluster at `address` or RAY_ADDRESS, or on a new local cluster.
    Raises CannotRunError.
    """
    with ExitStack() as started:
        where: dict[str, str | None] = {"address": f"ray://{address}" if address else None}
        if not address and not os.environ.get("RAY_ADDRESS"):
            # Without a token, Ray runs code of every user who reaches its port. Ray itself would
            # keep the token in a file of the home folder that others may read.
            mode = os.environ.setdefault("RAY_AUTH_MODE", "token")
            version = metadata.version("ray")
            if mode != "token" or tuple(map(int, version.split(".")[:2])) < _WITH_TOKENS:
                raise CannotRunError(
                    f"--on ray: Ray {version} with RAY_AUTH_MODE={mode} would start a cluster that "
                    "runs code of every user who reaches it; install ray>=2.52 and unset "
                    "RAY_AUTH_MODE, or set RAY_ADDRESS to a cluster of your own"
                )
            if not (os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")):
                os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
            # All users can write to Ray's own folder: to the code there, and to the address of
            # the cluster that Ray joins by default.
            base = os.environ.get("RAY_TMPDIR")
            folder = started.enter_context(scratch.folder(Path(base) if base else None))
            where = {"address": "local", "_temp_dir": str(folder)}
        ray = importlib.import_module("ray")
        there = address or os.environ.get("RAY_ADDRESS", "").removeprefix("ray://")
        host, _, port = there.rpartition(":")
        try:
            if port.isdigit() and int(port) < 1 << 16:  # Ray itself retries for over a minute
                socket.create_connection((host.strip("[]"), int(port)), _REACHED_S).close()
            ray.init(
                **where,
                runtime_env={"working_dir": os.getcwd(), "excludes": list(_LEFT_BEHIND)},
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise CannotRunError(
                f"--on ray: no Ray cluster was reached or started ({_first_line(error)}); pass "
                "--on ray://HOST:PORT of a cluster's client server, set RAY_ADDRESS, or omit both "
                "to start one here"
            ) from None
        started.callback(ray.shutdown)
        return RayEngine(ray, work, started.pop_all())


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
