"""Whole training jobs, unchanged: `distcheck job -- torchrun --nproc-per-node 4 train.py`.

In the process that a person starts:

    command     the story: run the command, read what its ranks wrote, judge, report
    running     starts the command, passes its output on, says why nothing was recorded
    leftovers   the job's folder, and those that a killed command has left; in_use marks them
    settings    what the ranks are asked for, as a file
    checks/     comparisons; pure functions of a recording
    accepting   deviations that are meant, and what they promise
    causes      from failed checks to named causes, and against_reference, between_passes

In the processes of the job, by way of `hook/sitecustomize.py`:

    inside/start      waits for `import torch`
    inside/hooks      the places in torch where a training script passes
    inside/recorder   writes down what passes there
"""
