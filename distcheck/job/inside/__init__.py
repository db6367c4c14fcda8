"""What runs in the processes of a job; `hook/sitecustomize.py` begins it.

start, install     wait for `import torch`; then let one of these listen to the hooks:
hooks, listening   where every training script passes, and what is heard there
recorder           writes down what a rank does, with loaders, terms, parameters, step_file
modules            the modules within a model, with watching for those of a replay's copies
op_log             every operator that torch runs in a step
replayer           runs the script as one process with the ranks' batches: handing_out, feeding
replay_tasks       what that process computes beside: forks, folding, choosing, state
guarded            a guard on every optimizer, for `distcheck job --guard`

alone, on_cpu      stand-ins: one rank in place of many, and a CPU in place of GPUs
rank, marking, ending
                   which process is a rank, what it says of itself, and whether all have ended
"""
