"""Runs in every Python process of a job: loads the sitecustomize module of the interpreter, and
starts recording.

The folder of this file is the first entry of PYTHONPATH. Nothing here imports torch.
"""

import importlib
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _run_the_one_behind() -> None:
    """Run the sitecustomize module that Python would have imported without this one."""
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != _HERE]
    own = sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        if own is not None:
            sys.modules.setdefault("sitecustomize", own)


def _start_recording() -> None:
    settings = os.environ.get("DISTCHECK_JOB")
    if not settings:
        return
    try:
        from distcheck.job.inside import start
    except ImportError as error:
        try:
            with open(os.path.join(os.path.dirname(settings), "no-distcheck"), "w") as note:
                note.write(f"{sys.executable}\n{error}\n")
        except OSError:
            pass
        return
    start.begin(settings)


_start_recording()
_run_the_one_behind()
