"""What should have been: expectations, computed without the code they judge.

A layer is one file, named by its line in `records/layers.py`. It has a function for each check that
it can judge by (`gradients`, `loss`, ...), from a step of a recorded run to frozen data
(`forms.py`), which is all that the check is given:

    closed_form.py  lattice: integers in closed form (lattice.py)
    bitwise.py      bitwise: the shards reduced in the order that the contract names
                    (order_exact.py)
    rounding_bound.py    rounding: their mean, and the bound for any reduction order (rounding.py)
    full_batch_bound.py  full batch float64 and float32: the full batch in a single process
                         (full_batch.py)
    unlayered.py    expected values without a layer

What they start from:

    references.py   what is built once a process; one step, as the ranks recorded it; the
                    optimizer's step
    shares.py       what each rank counts for
    shards.py       each rank's own part, again, from the state that rank recorded
    ghost_batch.py  BatchNorm in the whole batch, as the ranks have it
    kinks.py, own_rounding.py, between_devices.py   where rounding is beyond the bound of full batch
                                                    float32
    quantum.py, low_rank.py, averaging.py   what --accept widens
    calibration.py  whether the orders that the bitwise layer relies on hold on this machine

Every step starts from what the ranks recorded before it: free-running trajectories diverge
chaotically, re-synchronized ones do not.
"""

import importlib
from typing import TYPE_CHECKING, Any

from distcheck.records.layers import oracle_of

if TYPE_CHECKING:
    from distcheck.judge.oracles.references import AtStep


def expect(check: str, layer: str, at: "AtStep") -> Any:
    """What a check compares with at a step, by a layer; None where it compares ranks only, or has
    nothing to compare at this step.
    """
    module = importlib.import_module(f"{__name__}.{oracle_of(layer)}")
    function = getattr(module, check.replace(" ", "_"), None)
    return None if function is None else function(at)
