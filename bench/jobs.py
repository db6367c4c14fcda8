"""CPU time of `distcheck job` over the plain job of the same steps, and the bugs that it catches.

python bench/jobs.py                  right scripts at worlds 2, 3, 4, planted bugs, ratios
python bench/jobs.py --worlds 2 --seeds 1 --without-bugs
python bench/jobs.py --only ratios --scripts plain_ddp.py nanogpt_like.py
python bench/jobs.py --only bugs --scripts nanogpt_like.py --bugs-at 2 3
python bench/jobs.py --only right --first-seed 7 --seeds 3

Prints right scripts passed / tried, and bugs caught and named / planted, with those beside which
another cause was named; the smallest factor of the loss that is caught; and for each script two
ratios of CPU times (user and system, of all processes; medians of `--repeat` runs, with minimum and
maximum): the whole command, and the same without a reference, over the job itself, which is ended
after as many steps. A seed is planted into a script as the seed of its model. With `--lines FILE`
every run is added to a file as soon as it is over, and runs that are there already are left out.
"""

import argparse
import json
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[1] / "examples" / "jobs"
STEPS = 6
# A factor of the loss that grows with the number of ranks, on two of them 1 + the error.
SCALED = "F.cross_entropy(model(inputs), labels)"
ERRORS = (1e-5, 3e-6, 1e-6, 3e-7, 1e-7)
# Ends a script after as many optimizer steps as distcheck records, so that both do the same work.
PLAIN = f"""
import os, runpy, sys, torch
from torch.optim.optimizer import register_optimizer_step_post_hook
made = 0
def count(*_):
    global made
    made += 1
    if made == {STEPS}:
        torch.distributed.barrier()
        os._exit(0)
register_optimizer_step_post_hook(count)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def used_s() -> float:
    """CPU seconds of all processes that this one has started and waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def judge(script: Path, world: int, *options: str) -> tuple[dict[str, Any], float]:
    """The case of the report, and the CPU seconds of the command."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        words = [sys.executable, "-m", "distcheck", "job", "--steps", str(STEPS), *options]
        words += ["--json", str(file), "--nproc", str(world), "--", sys.executable, str(script)]
        begun = used_s()
        ran = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
        spent_s = used_s() - begun
        if not file.exists():
            return {"verdict": "none", "diagnosis": [], "said": ran.stderr[-500:]}, spent_s
        return json.loads(file.read_text())["cases"][0], spent_s


def plain_s(script: Path, world: int) -> float:
    """CPU seconds of the job itself for as many steps."""
    with tempfile.TemporaryDirectory() as folder:
        runner = Path(folder) / "plain.py"
        runner.write_text(PLAIN)
        words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world)]
        begun = used_s()
        subprocess.run([*words, str(runner), str(script)], capture_output=True, check=True)
        return used_s() - begun


def seeded(script: Path, seed: int, folder: Path) -> Path:
    """The script with another seed for its model."""
    text = script.read_text()
    changed = re.sub(
        r"(manual_seed|set_seed|seed_everything)\((\d+)", rf"\1({seed} + \2", text, count=1
    )
    copy = folder / script.name
    copy.write_text(changed)
    return copy


class Lines:
    """What is known of runs so far, one line each, in a file if one is asked for."""

    def __init__(self, file: str | None) -> None:
        self._file = Path(file) if file else None
        lines = self._file.read_text().splitlines() if self._file and self._file.exists() else []
        self._known = {
            key: json.loads(found) for key, _, found in (x.partition("\t") for x in lines)
        }

    def judged(self, key: str, script: Path, world: int) -> tuple[str, list[str]]:
        """The verdict and the causes of a run, which is made unless it is known."""
        if key not in self._known:
            case, spent_s = judge(script, world)
            causes = [found["cause"] for found in case["diagnosis"]]
            self._known[key] = [case["verdict"], causes, round(spent_s, 1)]
            if self._file is not None:
                with self._file.open("a") as lines:
                    lines.write(f"{key}\t{json.dumps(self._known[key])}\n")
        verdict, causes, _ = self._known[key]
        return verdict, causes


def right_scripts(scripts: list[Path], worlds: list[int], seeds: range, lines: Lines) -> None:
    """Right scripts passed over tried."""
    passed = tried = 0
    with tempfile.TemporaryDirectory() as folder:
        for script in scripts:
            for world in worlds:
                for seed in seeds:
                    key = f"{script.name}, world {world}, seed {seed}"
                    wrong = seeded(script, seed, Path(folder))
                    verdict, causes = lines.judged(key, wrong, world)
                    tried += 1
                    passed += verdict == "pass"
                    if verdict != "pass":
                        print(f"  {key}: {verdict}, {causes}")
    print(f"right scripts passed: {passed} / {tried}")


def planted_bugs(scripts: list[Path], worlds: list[int], lines: Lines) -> None:
    """Bugs caught, those whose cause was named, and those with another one beside it."""
    found = tomllib.loads((EXAMPLES / "planted.toml").read_text())["bug"]
    names = {script.name for script in scripts}
    bugs = [(bug, world) for bug in found for world in worlds if bug["script"] in names]
    caught = named = beside = 0
    with tempfile.TemporaryDirectory() as folder:
        for bug, world in bugs:
            wrong = Path(folder) / bug["script"]
            wrong.write_text(
                (EXAMPLES / bug["script"]).read_text().replace(bug["find"], bug["put"])
            )
            key = bug["name"] if world == 2 else f"{bug['name']}, world {world}"
            verdict, causes = lines.judged(key, wrong, world)
            caught += verdict == "fail"
            named += bug["cause"] in causes
            beside += bool(set(causes) - {bug["cause"]})
            if causes != [bug["cause"]]:
                print(f"  {key}: {verdict}, {causes}, planted {bug['cause']}")
    print(f"planted bugs caught: {caught} / {len(bugs)}, named: {named} / {len(bugs)}, "
          f"another cause named as well: {beside}")  # fmt: skip


def smallest_error(lines: Lines) -> None:
    """Factors of the loss in float32, down to the first that passes, with and without a mean."""
    for name in ("plain_ddp.py", "zero.py", "fsdp2.py"):
        with tempfile.TemporaryDirectory() as folder:
            for error in ERRORS:
                wrong = Path(folder) / name
                factor = f"{SCALED} * (1 + {error} * (world - 1))"
                wrong.write_text((EXAMPLES / name).read_text().replace(SCALED, factor))
                verdict, causes = lines.judged(f"{name}, loss off by {error}", wrong, 2)
                print(f"  {name}: loss off by {error}: {verdict}, {causes}")
                if verdict != "fail":
                    break


def ratios(scripts: list[Path], repeat: int) -> None:
    """The command, and its recording alone, over the job; alternating."""
    for script in scripts:
        rows = [
            (plain_s(script, 2), judge(script, 2)[1], judge(script, 2, "--no-reference")[1])
            for _ in range(repeat)
        ]
        plain, whole, recording = (statistics.median(column) for column in zip(*rows, strict=True))
        spread = ", ".join(f"{min(c):.1f} to {max(c):.1f}" for c in zip(*rows, strict=True))
        print(f"{script.name}: whole command {whole / plain:.2f}x, without reference "
              f"{recording / plain:.2f}x of {plain:.1f} CPU s (job, command, recording: {spread})",
              flush=True)  # fmt: skip


def main() -> None:
    """Parses the options and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=int, nargs="*", default=[2, 3, 4])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--bugs-at", type=int, nargs="*", default=[2], metavar="WORLD")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--scripts", nargs="*", default=[])
    parser.add_argument("--only", choices=["right", "bugs", "error", "ratios"])
    parser.add_argument("--without-bugs", action="store_true")
    parser.add_argument("--without-ratios", action="store_true")
    parser.add_argument("--lines", metavar="FILE")
    asked = parser.parse_args()
    lines = Lines(asked.lines)
    scripts = [EXAMPLES / name for name in asked.scripts] or sorted(EXAMPLES.glob("*.py"))
    if asked.only in (None, "right") and asked.seeds and asked.worlds:
        seeds = range(asked.first_seed, asked.first_seed + asked.seeds)
        right_scripts(scripts, asked.worlds, seeds, lines)
    if asked.only in (None, "bugs") and not asked.without_bugs:
        planted_bugs(scripts, asked.bugs_at, lines)
    if asked.only in (None, "error"):
        smallest_error(lines)
    if asked.only in (None, "ratios") and not asked.without_ratios:
        ratios(scripts, asked.repeat)


if __name__ == "__main__":
    main()
