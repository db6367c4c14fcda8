"""Code that runs in the processes of a job, started by `hook/sitecustomize.py`.

start, install     wait for `import torch`, then attach one of these listeners to the hooks:
hooks, listener    the calls that every training script makes, and the listeners' base class
recorder           records a rank, with loaders, terms, parameters, step_file
modules            the modules within a model; watching does so for the copies of a replay
op_log             every operator that torch runs in a step
replayer           runs the script as a single process with the ranks' batches:
                   batch_injection, batch_source
replay_tasks       additional runs of that process: forks, merged_batch, choosing, state
guarded            a guard on every optimizer, for `distcheck job --guard`
single_process_group, on_cpu
                   stand-ins: one rank in place of many, and a CPU in place of GPUs
rank, marking, ending
                   identify rank processes, their status, and whether all have finished
"""
