"""Everything that one run on a machine with a GPU must show, or what fits into its time.

    OUT=FOLDER python3 tests/gpu/on_a_gpu.py [--device DEVICE] [--small] [--budget-s S]
                                             [--only PART]

Nothing is installed, and nothing is fetched: packages that are missing there, and an NCCL that lets
ranks share the GPU, are taken from build/gpu (`tests/gpu/prepare.py` fills it). Each part is a
command with a limit of its own; one that fails or hangs stops no other. Some parts run beside
others; those whose seconds count run alone. The results are in FOLDER as they come:

    results.json   for each part its command, how it ended, its seconds and figures
    reports.json   the JSON that the commands wrote
    log.txt        what they printed, and the table that is printed last

`--device cpu --small` rehearses the command lines where there is no GPU, over gloo.
"""

import argparse
import contextlib
import json
import lzma
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

from parts import NO_GPU, Part, Place, derived, phases  # noqa: E402

BROUGHT = ROOT / "build" / "gpu"
LINKS = {"distcheck_strategies": "strategies", "distcheck_mutants": "tests/mutants"}
GRACE_S = 8.0  # for an interrupted command to end its ranks
TAIL = 1500  # characters of a command's output that stand in results.json


@dataclass
class Result:
    """How a part went."""

    part: Part
    state: str = "not begun"
    code: int | None = None
    seconds: float = 0.0
    most_mib: int | None = None
    figures: dict[str, Any] = field(default_factory=dict)
    tail: str = ""

    def as_document(self) -> dict[str, Any]:
        return {
            "part": self.part.name, "state": self.state, "code": self.code,
            "seconds": round(self.seconds, 1), "limit_s": self.part.limit_s,
            "gpu_memory_most_mib": self.most_mib, "command": " ".join(self.part.words)[:400],
            "figures": self.figures, "tail": self.tail,
        }  # fmt: skip


def make_site(folder: Path) -> None:
    """Files that stand for an installation: entry points, packages by their installed names, and
    what was brought.
    """
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (version,) = re.findall(r'__version__ = "(.*)"', (ROOT / "distcheck/__init__.py").read_text())
    made = folder / f"distcheck-{version}.dist-info"
    made.mkdir(parents=True)
    (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: distcheck\nVersion: {version}\n")
    groups = {**about["entry-points"], "console_scripts": about["scripts"]}
    lines = []
    for group, points in groups.items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (made / "entry_points.txt").write_text("\n".join(lines) + "\n")
    for package, place in LINKS.items():
        (folder / package).symlink_to(ROOT / place)
    try:
        import msgspec  # noqa: F401
    except ImportError:
        for wheel in BROUGHT.glob("msgspec-*.whl"):
            zipfile.ZipFile(wheel).extractall(folder)


def unpack_nccl(folder: Path) -> str:
    """The library that was brought, unpacked; empty where there is none."""
    packed = BROUGHT / "libnccl.so.2.xz"
    if not packed.exists():
        return ""
    file = folder / "libnccl.so.2"
    with lzma.open(packed) as source, file.open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 24)
    return str(file)


class Memory:
    """How much of the GPU's memory is taken, by nvidia-smi, several times a second."""

    def __init__(self) -> None:
        words = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        self._seen: list[tuple[float, int]] = []
        self._looking: subprocess.Popen[str] | None = None
        with contextlib.suppress(OSError):
            self._looking = subprocess.Popen(
                [*words, "-lms", "250"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                text=True,
            )  # fmt: skip
            threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        assert self._looking is not None
        for line in self._looking.stdout or ():
            with contextlib.suppress(ValueError):
                self._seen.append((time.monotonic(), int(line)))

    def most(self, begun: float, ended: float) -> int | None:
        """The most MiB between two moments."""
        return max((mib for when, mib in list(self._seen) if begun <= when <= ended), default=None)

    def close(self) -> None:
        """Looks no longer."""
        if self._looking is not None:
            self._looking.kill()
            self._looking.wait()


class Run:
    """All parts, their results, and the files of those."""

    def __init__(self, out: Path, place: Place, until: float, scratch: Path) -> None:
        self._out, self._place, self._until, self._scratch = out, place, until, scratch
        self._lock = threading.Lock()
        self._log = (out / "log.txt").open("w")
        self._reports: dict[str, Any] = {}
        self._memory = Memory()
        self.results: list[Result] = []

    def phase(self, parts: list[Part], beside: int) -> None:
        """Runs parts, so many beside each other, and returns when all have ended."""
        results = [Result(part) for part in parts]
        self.results += results
        with ThreadPoolExecutor(beside) as pool:
            list(pool.map(self._run, results))

    def _run(self, result: Result) -> None:
        part, begun = result.part, time.monotonic()
        limit = min(part.limit_s, self._until - begun)
        try:
            if limit < 5:
                result.state = "no time left"
            else:
                self._command(result, limit)
        except Exception as error:  # of this program: the other parts go on
            result.state, result.tail = "not run", f"{type(error).__name__}: {error}"
        result.seconds = time.monotonic() - begun
        result.most_mib = self._memory.most(begun, time.monotonic())
        with self._lock:
            self.say(f"{part.name}: {result.state} after {result.seconds:.1f} s")
            self.write()

    def _command(self, result: Result, limit: float) -> None:
        part = result.part
        folder = self._scratch / re.sub(r"\W+", "-", part.name)
        folder.mkdir()
        for name, text in part.files.items():
            (folder / name).write_text(text)
        words = [word.replace("{ROOT}", str(ROOT)) for word in part.words]
        output = folder / "output.txt"
        with output.open("wb") as sink:
            process = subprocess.Popen(
                words, cwd=folder, env={**os.environ, **self._place.environment(part)},
                stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            is_late = end_after(process, limit)
        text = output.read_text(errors="backslashreplace")
        result.code, result.tail = process.returncode, text[-TAIL:]
        if is_late:
            result.state = f"ended after {limit:.0f} s"
        elif result.code == part.code:
            result.state = "as expected"
        elif result.code and self._place.device == "cuda" and NO_GPU.search(text):
            result.state = "no GPU"
        else:
            result.state = (
                "NOT as expected" if part.code is not None else f"exit code {result.code}"
            )
        with self._lock:
            self._log.write(f"\n==== {part.name}: {' '.join(words)}\n{text}\n")
            for file in sorted(folder.glob("*.json")):
                with contextlib.suppress(ValueError):
                    self._reports[f"{part.name}/{file.stem}"] = json.loads(file.read_text())
        if result.state != "no GPU":
            try:
                result.figures = part.read(folder, text)
            except (KeyError, TypeError, ValueError) as error:
                result.figures = {"not read": f"{type(error).__name__}: {error}"}

    def say(self, text: str) -> None:
        """Prints a line, and keeps it."""
        print(text, flush=True)
        self._log.write(text + "\n")
        self._log.flush()

    def write(self) -> None:
        """Writes what is known until now."""
        figures = {r.part.name: (r.seconds, r.figures) for r in self.results}
        document = {
            "device": self._place.device, "small": self._place.small, "derived": derived(figures),
            "parts": [result.as_document() for result in self.results],
        }  # fmt: skip
        for name, content in (("results.json", document), ("reports.json", self._reports)):
            part = self._out / f"{name}.part"
            part.write_text(json.dumps(content, indent=1, default=str))
            os.replace(part, self._out / name)

    def close(self) -> None:
        """Prints one line for each part, with its figures in short, and ends."""
        self._memory.close()
        width = max(len(result.part.name) for result in self.results)
        for result in self.results:
            short = "; ".join(
                f"{k} {v}" for k, v in result.figures.items() if not isinstance(v, dict | list)
            )
            self.say(
                f"{result.part.name:<{width}}  {result.state:<16} {result.seconds:>6.1f} s  {short}"
            )


def end_after(process: "subprocess.Popen[bytes]", limit: float) -> bool:
    """Waits for a command, and ends it with all that it started when it takes longer."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(limit)
        return False
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
            break
    with contextlib.suppress(ProcessLookupError):  # what its end has left in its session
        os.killpg(process.pid, signal.SIGKILL)
    return True


def main() -> None:
    """Runs what was asked for; the exit code is 0, whatever the parts came to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="small batches, few steps and mutants")
    parser.add_argument("--budget-s", type=float, default=345.0)
    parser.add_argument(
        "--only", action="append", default=[], help="parts whose names contain this"
    )
    asked = parser.parse_args()
    begun = time.monotonic()
    out = Path(os.environ.get("OUT") or tempfile.mkdtemp(prefix="on-a-gpu-"))
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="distcheck-gpu-") as name:
        scratch = Path(name)
        make_site(scratch / "site")
        place = Place(
            device=asked.device, small=asked.small, site=str(scratch / "site"), root=str(ROOT),
            nccl=unpack_nccl(scratch) if asked.device == "cuda" else "",
        )  # fmt: skip
        run = Run(out, place, begun + asked.budget_s, scratch)
        for parts, beside in phases(place):
            chosen = [p for p in parts if not asked.only or any(o in p.name for o in asked.only)]
            run.phase(chosen, beside)
        run.say("")
        run.close()
        run.say(f"{time.monotonic() - begun:.0f} s in all; the files are in {out}")
        run.write()


if __name__ == "__main__":
    main()
