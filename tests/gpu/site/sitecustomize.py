"""Pretends a GPU in every interpreter that finds this folder in PYTHONPATH.

`distcheck.machine.devices` is the one module that asks what there is and takes a process to it:
when it is imported, it is told that there is one GPU, and `enter` begins to pretend.
"""

import importlib.abc
import importlib.util
import sys


class _OfDevices(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self._looking = False

    def find_spec(self, name, path, target=None):  # type: ignore[no-untyped-def]
        if name != "distcheck.machine.devices" or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looking = False
        execute = spec.loader.exec_module

        def exec_module(module):  # type: ignore[no-untyped-def]
            execute(module)
            module.gpu_count = lambda environ=None: 1
            module.enter = _entering(module.enter)

        spec.loader.exec_module = exec_module
        return spec


def _entering(enter):  # type: ignore[no-untyped-def]
    def pretended(device, local_rank):  # type: ignore[no-untyped-def]
        if device == "cuda":
            from tests.gpu.pretended import pretend

            pretend()
        return enter(device, local_rank)

    return pretended


sys.meta_path.insert(0, _OfDevices())
