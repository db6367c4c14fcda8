"""The names by which user code requests arguments, and their meanings. Does not import torch.
`Scene.value` resolves a meaning; several names share one.
"""


def _split(text: str) -> frozenset[str]:
    return frozenset(text.split())


MODELS = _split(
    "model net network module policy actor critic actor_critic ac nn_model ddp_model my_model "
    "policy_net policy_network q_network qnet encoder classifier local_model nnet wrapped "
    "base_model student m mlp"
)
# Objects that hold a model, an optimizer and more.
OWNERS = _split("trainer agent runner learner worker solver algo algorithm experiment ctx context")
OPTIMIZERS = _split("optimizer optim opt base_optimizer inner_optimizer optimiser")
LISTED_PARAMETERS = _split("param_list parameter_list")
PARAMETERS = _split("params parameters model_params weights") | LISTED_PARAMETERS
GRADIENTS = _split(
    "grads gradients grad_list gradient_list grads_list tensors tensor_list local_grads"
)
# Of a function with two lists: each rank's gradients, and the output for their mean.
GRADIENTS_IN = _split("grad_in grads_in gradients_in")
GRADIENTS_OUT = _split("grad_out grads_out gradients_out")
# Residuals of a compressed all-reduce, kept for the next step.
MEMORIES = _split("memory_out memory memories residuals error_memory")
SENT = _split(
    "send sendbuf send_buf send_buff send_buffer send_tensor src src_tensor src_array inp input "
    "input_tensor local in_tensor source"
)
RECEIVED = _split(
    "recv recvbuf recv_buf recv_buff recv_buffer recv_tensor dst dest dest_array dst_tensor "
    "dest_tensor out output output_tensor result out_tensor"
)
TENSORS = SENT | _split(
    "tensor t x grad gradient g data buf buffer arr array vec vector value values local_grad "
    "param_grad flat_grad flat tensor_in"
)

_FACTS = {
    "rank": "rank my_rank rank_id worker_id proc_id process_id global_rank id_rank this_rank "
    "rankid",
    "local_rank": "local_rank gpu gpu_id device_id",
    "world_size": "world_size size num_ranks n_ranks nranks nprocs num_procs n_procs world "
    "num_replicas num_processes num_workers n_workers number_of_processes num_proc comm_size "
    "num_gpus ngpus n_gpus num_devices n_devices num_nodes n_nodes nworkers worldsize wsize",
    "group": "group process_group pg dist_group proc_group dp_group data_parallel_group comm_dp "
    "dp_comm dp_pg dp_process_group data_parallel_process_group ddp_group comm_group world_group "
    "allreduce_group all_reduce_group grad_group gradient_group",
    "device": "device dev",
    "backend": "backend",
    "optimizer": " ".join(OPTIMIZERS),
    "step": "step",
    "index": "iteration it iter i batch_idx global_step step_idx iter_num step_num n_iter t_step",
    "epoch": "epoch",
    "arguments": "args config cfg opts options hparams conf",
    "communicator": "comm communicator mpi_comm comm_world world_comm",
    "sum": "op reduce_op",
    "rate": "lr learning_rate",
    "samples": "batch_size bs num_samples local_batch_size",
    "tokens": "local_tokens local_num_tokens num_local_tokens local_token_count",
    "root": "root root_rank master_rank",
    "model": " ".join(MODELS),
    "parameters": " ".join(PARAMETERS - LISTED_PARAMETERS),
    "listed_parameters": " ".join(LISTED_PARAMETERS),
    "named_parameters": "named_parameters named_params",
    "listed_named_parameters": "named_param_list named_parameter_list",
    "gradients": " ".join(GRADIENTS | GRADIENTS_IN | GRADIENTS_OUT),
    "groups": "param_groups parameter_groups",
    "closure": "closure",
    "distributed": "dist",
    "timer": "timer",
    "bucket_mb": "bucket_size_mb bucket_cap_mb bucket_mb bucket_size_mib buffer_size_mb cap_mb",
    "bucket_bytes": "bucket_size_bytes bucket_bytes bucket_cap_bytes bucket_cap buffer_size",
}
MEANINGS = {name: meaning for meaning, names in _FACTS.items() for name in names.split()}


def meaning_of(name: str) -> str:
    """Return the meaning of a name; empty if it has none."""
    return MEANINGS.get(name, "")


# Facts of the world, and subjects of a synchronization; a subject is recognized in any position.
WORLD = frozenset(
    name
    for name, meaning in MEANINGS.items()
    if meaning in ("rank", "local_rank", "world_size", "group", "communicator", "backend", "root")
)
SUBJECTS = MODELS | OPTIMIZERS | PARAMETERS | GRADIENTS | GRADIENTS_IN | TENSORS
SUBJECTS |= {name for name, meaning in MEANINGS.items() if meaning.endswith("named_parameters")}
# Defaults that describe a single process, by meaning, and names that may mean something else.
OF_ONE_PROCESS = {"world_size": 1, "rank": 0, "local_rank": 0}
AMBIGUOUS = _split("size world gpu gpu_id device_id worker_id")

BEFORE_TRAINING = _split(
    "model rank local_rank world_size group communicator device backend arguments parameters "
    "named_parameters listed_parameters distributed root"
)

# Meanings of module-level names that the module does not define. One-letter names and lists are
# excluded as too ambiguous.
FREE = {
    name: meaning
    for name, meaning in MEANINGS.items()
    if not meaning.endswith(("parameters", "gradients"))
    and meaning not in ("samples", "tokens", "sum", "root")
    and len(name) > 2
}

# Modules and objects that scripts import, for code copied from a part of a script.
IMPORTED = {
    "math": "math", "time": "time", "os": "os", "sys": "sys", "copy": "copy", "random": "random",
    "np": "numpy", "numpy": "numpy", "torch": "torch", "nn": "torch.nn",
    "F": "torch.nn.functional", "optim": "torch.optim", "dist": "torch.distributed",
    "MPI": "mpi4py.MPI", "logging": "logging",
}  # fmt: skip
NO_FINISH = "none"  # value of --finish: nothing is called after backward

FINISH = (
    "finish_gradient_synchronization", "finish_gradient_sync", "finish_grad_sync", "finish_sync",
    "synchronize_gradients", "sync_gradients", "sync_grads", "sync_grad", "synchronize_grads",
    "average_gradients", "average_grads", "avg_gradients", "allreduce_gradients",
    "all_reduce_gradients", "allreduce_grads", "all_reduce_grads", "reduce_gradients",
    "reduce_grads", "reduce_grad", "apply_collective_grads", "gradient_sync", "grad_sync",
    "aggregate_gradients", "aggregate", "finalize_gradients", "finalize_backward",
    "finish_backward", "wait_for_gradients", "wait_grads", "wait_all", "on_after_backward",
    "after_backward", "post_backward", "finish", "synchronize", "sync", "wait", "all_reduce",
    "allreduce", "reduce",
)  # fmt: skip
BEGIN = ("parallelize", "wrap", "prepare", "prepare_model", "distribute")  # once, before training
RESET = (
    "on_train_batch_start", "reset", "reset_buckets", "reset_state", "reset_gradients",
    "reset_grads", "reset_buffers", "reset_handles", "zero_grad_buffer", "zero_grad_buffers",
    "clear_handles", "clear_buckets",
)  # fmt: skip
