"""Peak memory of a recorded rank of vgg11 over that of a bare one, in models' sizes.

The bare rank is `distcheck train`, the recorded one `distcheck verify`: the same process image,
loop and strategy, with and without a recorder. The aim, model + 3 gradients, is 4 models' sizes,
since a model's gradients are as large as itself. The trace is memory of nobody's process, but
takes up the machine's; it is printed apart, per rank and step.
"""

import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

SCRIPT = [sys.executable, str(Path(sysconfig.get_path("scripts"), "distcheck"))]
STRATEGY = str(Path(__file__).parent.resolve() / "peers" / "measured_allreduce.py")
WORLD, STEPS, ROUNDS = 4, 4, 3
MODEL_BYTES = 9_231_114 * 4  # VGG11 with BatchNorm and a 512->10 head, float32
AIM = 4.0


def notes(words: list[str]) -> list[tuple[int, int]]:
    """(peak bytes, trace bytes) of every rank that the command started."""
    folder = tempfile.mkdtemp()
    command = [*SCRIPT, *words, "--strategy", f"{STRATEGY}:measured_allreduce",
               "--world", str(WORLD), "--workload", "vgg11", "--steps", str(STEPS)]  # fmt: skip
    subprocess.run(
        command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"BENCH_NOTES": folder}
    )
    found = [path.read_text().split() for path in Path(folder).iterdir()]
    if len(found) < WORLD:
        sys.exit(f"{' '.join(command)} left {len(found)} notes of {WORLD}")
    return [(int(peak), int(trace)) for peak, trace in found]


if __name__ == "__main__":
    os.chdir(tempfile.mkdtemp())
    ratios, traces = [], []
    for _ in range(ROUNDS):
        recorded, bare = notes(["verify"]), notes(["train"])
        extra = max(peak for peak, _ in recorded) - max(peak for peak, _ in bare)
        ratios.append(extra / MODEL_BYTES)
        # By the last sync, all but the last step's synced gradients and parameters are written.
        traces.append(max(trace for _, trace in recorded) / MODEL_BYTES / WORLD / STEPS)
    print(
        f"peak of a recorded rank beyond a bare one, in models of {MODEL_BYTES / 2**20:.0f} MiB: "
        f"from {min(ratios):.2f} to {max(ratios):.2f} over {ROUNDS} rounds; aim: at most {AIM}"
    )
    print(f"shared trace, per rank and step, in models: {min(traces):.2f} to {max(traces):.2f}")
