"""Whether ranks can share a GPU over NCCL, and with which settings. Prints JSON.

    python tests/gpu/share.py nccl cuda [RANKS]         gloo cpu to rehearse

Each setting is tried in processes of their own, which have some seconds: where the kernels of all
ranks do not fit on the GPU, they hang. The first setting that works is "works with".
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

LIMIT_S = 25.0
NO_GPU = "torch finds no NVIDIA GPU"
TO_SHARE = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2"}
# What has helped others where sharing hangs or fails, one after the other.
SETTINGS = (
    {},
    {"NCCL_P2P_DISABLE": "1"},
    {"NCCL_P2P_DISABLE": "1", "NCCL_NET_GDR_LEVEL": "LOC", "NCCL_MAX_CTAS": "1"},
    {"NCCL_CUMEM_ENABLE": "0", "NCCL_P2P_DISABLE": "1", "NCCL_MAX_CTAS": "1"},
)


def rank(backend: str, device: str, own: int, ranks: int, file: str) -> None:
    """What one process does: some sums, small and large, which must be right."""
    import torch
    import torch.distributed as dist

    if device == "cuda" and not torch.cuda.is_available():
        sys.exit(NO_GPU)
    begun = time.perf_counter()
    dist.init_process_group(
        backend, init_method=f"file://{file}", rank=own, world_size=ranks,
        timeout=timedelta(seconds=LIMIT_S),
    )  # fmt: skip
    for elements in (1, 1000, 10_000_000):
        numbers = torch.full((elements,), float(own + 1), device=device)
        dist.all_reduce(numbers)
        assert bool((numbers == ranks * (ranks + 1) / 2).all()), numbers
    ready, times = time.perf_counter() - begun, []
    numbers = torch.ones(250_000, device=device)
    for _ in range(20):
        begun = time.perf_counter()
        dist.all_reduce(numbers)
        float(numbers[0])  # waits for it
        times.append(time.perf_counter() - begun)
    if own == 0:
        print(f"first sums {ready:.2f} s, then {1e3 * sorted(times)[10]:.2f} ms for one of 1 MB")
    sys.stdout.flush()
    os._exit(0)


def tried(words: list[str], ranks: int, settings: dict[str, str]) -> tuple[bool, str]:
    """Whether a setting works; and what rank 0 printed, or what was wrong."""
    with tempfile.TemporaryDirectory() as folder:
        start, store = [sys.executable, __file__, *words, str(ranks)], str(Path(folder, "store"))
        processes = [
            subprocess.Popen(
                [*start, str(own), store], env={**os.environ, **TO_SHARE, **settings},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for own in range(ranks)
        ]  # fmt: skip
        until, said = time.monotonic() + LIMIT_S, []
        for process in processes:
            try:
                said.append(process.communicate(timeout=max(0.1, until - time.monotonic()))[0])
            except subprocess.TimeoutExpired:
                process.kill()
                said.append(f"hung: {process.communicate()[0]}")
    good = all(process.returncode == 0 for process in processes)
    wrong = [text for text, process in zip(said, processes, strict=True) if process.returncode]
    return good, (said[0] if good else wrong[0])[-600:].strip()


def main(words: list[str], ranks: int) -> None:
    """Tries settings until one works."""
    found: dict[str, str] = {}
    for settings in SETTINGS:
        good, said = tried(words, ranks, settings)
        found[" ".join(f"{n}={v}" for n, v in settings.items()) or "as they are"] = said
        if NO_GPU in said:
            sys.exit(NO_GPU)
        if good:
            print(json.dumps({"ranks": ranks, "works with": settings, "tried": found}))
            return
    print(json.dumps({"ranks": ranks, "works with": None, "tried": found}))
    sys.exit(1)


if __name__ == "__main__":
    if len(sys.argv) > 4:
        rank(sys.argv[1], sys.argv[2], int(sys.argv[4]), int(sys.argv[3]), sys.argv[5])
    else:
        main(sys.argv[1:3], int(sys.argv[3]) if len(sys.argv) > 3 else 2)
