"""Expectations of correct results, computed without the code that they judge.

A layer is one file, named in `records/layers.py`. It has a function for each check that it
supports, with the check's name (`gradients`, `loss`, ...). The function converts a step of a
recorded run to frozen data (`forms.py`), the only input of the check:

    closed_form.py  exact: integers in closed form (integers.py)
    bitwise.py      bitwise: the shards reduced in the order that the contract names
                    (order_exact.py)
    rounding_bound.py    rounding: their mean, and the bound for any reduction order (rounding.py)
    full_batch_bound.py  full batch float64 and float32: the full batch in a single process
                         (full_batch.py)
    unlayered.py    expected values without a layer

Shared parts:

    references.py   data built once per process; one recorded step; the optimizer step
    shares.py       rank weights
    shards.py       each rank's shard, recomputed from the state that the rank recorded
    ghost_batch.py  BatchNorm in the full batch, normalizing like the ranks
    kinks.py, own_rounding.py, between_devices.py   cases with rounding beyond the bound of full
                                                    batch float32
    quantum.py, low_rank.py         bounds widened by --accept
    design.py                       accepted designs: projections.py (of low_rank.py), averaging.py,
                                    outer.py, mixing.py
    calibration.py  tests of the orders that the bitwise layer relies on, on this machine

Every step starts from the recorded previous state, because errors of trajectories that are not
reset grow chaotically.
"""

import importlib
from typing import TYPE_CHECKING, Any

from distcheck.records.layers import oracle_file

if TYPE_CHECKING:
    from distcheck.judge.oracles.references import AtStep


def compute_expectation(check: str, layer: str, at: "AtStep") -> Any:
    """Return the expectation of a check and layer at a step. Return None if the check only compares
    ranks, or has nothing to compare at this step.
    """
    module = importlib.import_module(f"{__name__}.{oracle_file(layer)}")
    function = getattr(module, check.replace(" ", "_"), None)
    return None if function is None else function(at)
