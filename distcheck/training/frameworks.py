"""Libraries that engines come from: what is said where one is not installed. No torch."""

from distcheck.errors import CannotRunError

# The name that is imported, and the one that pip knows.
PACKAGES = {
    "accelerate": "accelerate",
    "deepspeed": "deepspeed",
    "fairscale": "fairscale",
    "lightning": "lightning",
    "megatron": "megatron-core",
    "transformers": "transformers",
}


def not_installed(error: ModuleNotFoundError) -> CannotRunError | None:
    """The error for a person where what is missing is one of these; None for any other module."""
    name = (error.name or "").partition(".")[0]
    if name not in PACKAGES:
        return None
    return CannotRunError(f"{name} is not installed here; run pip install {PACKAGES[name]}")
