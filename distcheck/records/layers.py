"""The comparisons of a check with its expectation, by the names that JSON, screens and pages use.
Screens and pages say "comparison"; code and JSON keys say `layer`. Does not import torch.

Code uses the constants below. No other module contains the name of a layer as a string, except
"exact", which is also a workload (`tests/unit/test_layers.py`).
"""

from collections.abc import Iterable

import msgspec

NO_LAYER = "-"  # of checks that compare without an expectation
EXACT, BITWISE, ROUNDING, IN_FLOAT32, IN_FLOAT64 = (
    "exact",
    "bitwise",
    "rounding",
    "full batch float32",
    "full batch float64",
)
_ANY, _SINGLE, _DOUBLE = ("float32", "float64", "bfloat16", "float16"), ("float32",), ("float64",)


class Layer(msgspec.Struct, frozen=True):
    """A source of expected values: its name, its reference, and its file in `judge/oracles/`.

    Cases in `dtypes` are judged by the layer; cases of workload `exact` only by layer `exact`. With
    `full_batch`, the reference is the gradient and the loss of the full batch.
    """

    name: str
    about: str
    oracle: str
    dtypes: tuple[str, ...] = ()
    full_batch: bool = False


_FULL = "compares with the full batch in a single process, by L2 norms, in"
LAYERS = {
    layer.name: layer
    for layer in (
        Layer(EXACT, "expects the result of exact integer arithmetic", "closed_form"),
        Layer(BITWISE, "expects the bits of the promised reduction order", "bitwise", _ANY),
        Layer(ROUNDING, "allows rounding errors in any summation order", "rounding_bound", _ANY),
        Layer(IN_FLOAT32, f"{_FULL} float32", "full_batch_bound", _SINGLE, True),
        Layer(IN_FLOAT64, f"{_FULL} float64", "full_batch_bound", _DOUBLE, True),
    )
}
FULL_BATCH_LAYERS = tuple(name for name, layer in LAYERS.items() if layer.full_batch)
_PLANNED_APART = (EXACT, BITWISE, ROUNDING, *FULL_BATCH_LAYERS)


def layers_of(dtype: str) -> tuple[str, ...]:
    return tuple(name for name, layer in LAYERS.items() if dtype in layer.dtypes)


def layers_for_any_case(names: Iterable[str]) -> list[str]:
    """Return the layers that need only the case's dtype; each judges the gradients."""
    return [name for name in names if name not in _PLANNED_APART]


def layer_label(layer: str) -> str:
    """Return the name of a layer, or "" for a check without a layer."""
    return "" if layer == NO_LAYER else layer


def check_with_layer(check: str, layer: str) -> str:
    """Return the name of a check with its layer, as in `gradients (rounding)`."""
    return check if layer == NO_LAYER else f"{check} ({layer})"


def oracle_file(layer: str) -> str:
    """Return the file in `judge/oracles/` for a layer, or for checks without a layer."""
    return "unlayered" if layer == NO_LAYER else LAYERS[layer].oracle


# Beginning of the message of check `outputs` if no rank returned any.
NO_OUTPUTS = (
    "outputs are not compared: backward() computed its loss without loss_of(batch) and without "
    "loss_of.given(outputs, batch), through which distcheck records the model's outputs"
)
# Beginning of the message of check `agreement` about tensors that ranks unsharded collectively.
TOGETHER = (
    "agreement cannot be checked for unsharded tensors: an accessor, a broadcast or "
    "full_tensor() returns the same result on all ranks, whatever each rank holds"
)
