"""DeepSpeed's engine, ZeRO stages 0 to 3, on CPUs; the first use builds an extension.

$ distcheck verify --strategy examples/frameworks/with_deepspeed.py:initialize --world 2
PASS
$ distcheck verify --strategy examples/frameworks/with_deepspeed.py:initialize --arg stage=2 --world 2
PASS
"""

import deepspeed

from distcheck.contract import strategy


@strategy(weighting=None, one_group=True)
def initialize(model, optimizer, stage=1):
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,  # its default clips to a norm of 1
        "zero_allow_untested_optimizer": True,
    }
    return deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=False
    )
