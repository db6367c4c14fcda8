"""One module per command, with the name of the command; click calls its function `command`.

A module with many options imports nothing expensive at its top, because shell completion imports it
at every press of Tab.
"""

# In the order of `distcheck --help`, with a summary of at most 80 columns.
COMMANDS = {
    "verify": "Compare strategies with single-process training.",
    "job": "Check an unmodified training job.",
    "explain": "Explain a cause, a symptom in words, or a finding of a guard.",
    "plan": "Print the cases that verify would run, with an estimate of the time.",
    "merge": "Merge the reports of verify --shard, one for each part.",
    "replay": "Rerun a saved case, run or bundle.",
    "recheck": "Judge a saved run again without starting ranks.",
    "report": "Convert a report to a different format.",
    "record": "Run verify, and save all tensors for distcheck compare.",
    "compare": "Compare a recorded run with a later one, or with a new run.",
    "runs": "List saved runs: date, verdict, command.",
    "open": "Open the HTML report of a saved run (default: the last).",
    "bundle": "Pack a run into a zip file that others can replay.",
    "scale": "Report error against world size, in simulated worlds.",
    "explore": "Search for the smallest case that makes a strategy fail.",
    "list": "Print strategies, workloads, data sets and checks.",
    "train": "Train with a strategy, without judging it.",
    "doctor": "Print versions, machine, calibration and available backends.",
    "backends": "Probe which operations of a backend are correct here.",
    "skill": "Print instructions for coding agents (SKILL.md), or install them.",
    "selftest": "Run planted bugs, and check that every one is caught here.",
}
