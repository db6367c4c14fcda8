"""Whole training jobs, unchanged: `distcheck job -- torchrun --nproc-per-node 4 train.py`.

In the process that a person starts:

    command, guard_command   the story: run the command, judge what its ranks wrote, report
    asked, settings          what a person gives; settings of the ranks, and their answers
    running                  starts the command, sees whether it hangs, passes its output on
    leftovers                the job's folder, and those that a killed command has left (in_use)
    machines                 recordings of several machines come together on one
    copying, replaying       a copy of the project, in which the script runs as one process
    perturbed_runs           ranks that train one model become one rank; the command once more,
                             with parameters moved by one ULP
    judging                  from a recording to checks, causes and a report; with
      step_view                one step as the diagnosis of `judge` reads it
      script_changes           gradients that the script changes, as one process does, too
      checks/                  comparisons: pure functions of a recording; fitting: factors
      causes                   from failed checks to causes
      layouts                  which axis a wrong gradient comes from, where ranks share a model
      by_module                which module is wrong first, in a second look where need be
      accepting                deviations that are meant, and what they promise
      resuming                 a restart, beside the recording of the whole job
    guard/                   `distcheck.guard`: ranks of a long run compare what they hold

In the processes of the job, by way of `hook/sitecustomize.py`:

    inside/start      waits for `import torch`
    inside/hooks      the places in torch where a training script passes
    inside/recorder   writes down what passes there
"""
