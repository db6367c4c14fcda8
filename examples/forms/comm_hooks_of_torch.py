"""Communication hooks that come with torch; there is no code to write.

$ distcheck verify --strategy torch.distributed.algorithms.ddp_comm_hooks.default_hooks:allreduce_hook --world 4
PASS

What compresses rounds, which is an error until it is promised:

$ distcheck verify --strategy torch.distributed.algorithms.ddp_comm_hooks.default_hooks:fp16_compress_hook --world 4
FAIL low-precision
"""
