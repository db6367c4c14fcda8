"""Unmodified training jobs: `distcheck job -- torchrun --nproc-per-node 4 train.py`.

In the front-end process:
    command, guard_command   the main sequence: run the command, judge the recording, report
    options, settings        the user's options; the ranks' settings, and their replies
    running                  starts the command, detects hangs, forwards its output
    leftovers                the job's folder, and folders of killed commands (in_use)
    machines                 merges the recordings of several machines on one of them
    copying, replaying       a copy of the project, in which the script runs as a single process
    perturbed_runs           unshards model-parallel ranks, and reruns the command with
                             parameters perturbed by one ULP
    judging                  from a recording to checks, causes and a report; uses
     step_view                one step, as `judge` diagnoses it
     script_changes           gradients that the script itself changes, also in a single process
     checks/                  comparisons: pure functions of a recording; fitting: factors
     causes                   from failed checks to causes
     layouts                  the mesh axis that causes a wrong gradient in a model-parallel job
     by_module                the first wrong module, in a rerun if necessary
     accepting                accepted deviations, and their promises
     resuming                 a restart, compared with the recording of the uninterrupted job
    guard/                   `distcheck.guard`: ranks of a long run compare their replicas
In the processes of the job, through `hook/sitecustomize.py`:
    inside/start      waits for `import torch`
    inside/hooks      patches the places in torch that a training script calls
    inside/recorder   records the calls
"""
