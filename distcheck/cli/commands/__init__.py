"""One file per command, with its name; click calls its `command`.

A file imports nothing heavy at its top: `distcheck --help` reads them all.
"""

# In the order of `distcheck --help`, with a summary of at most 80 columns.
COMMANDS = {
    "verify": "Judge strategies against single-process training.",
    "job": "Judge a whole training job, unchanged.",
    "explain": "Explain a cause, or what distcheck.guard has found in a job.",
    "plan": "Print what verify would run, and about how long it takes.",
    "merge": "Join the reports of the parts of verify --shard.",
    "replay": "Run a kept case, a run or a bundle again.",
    "recheck": "Judge a saved run again; starts no rank.",
    "report": "Write a report again in another format.",
    "record": "Verify and keep everything, for distcheck compare.",
    "compare": "Compare a recorded run with a later one, or with now.",
    "runs": "List the kept runs: date, verdict, command.",
    "open": "Show the page of a kept run, the last by default.",
    "bundle": "Pack a run into a zip that a colleague can replay.",
    "scale": "Judge in simulated worlds of many ranks: error against world.",
    "explore": "Search for the smallest case in which a strategy fails.",
    "list": "Print strategies, workloads, data sets and checks.",
    "train": "Train with a strategy, without judging it.",
    "doctor": "Print versions, machine, calibration, what can run here.",
    "backends": "Probe which operations of a backend are right here.",
    "selftest": "Run the mutant zoo: is every planted bug caught here?",
}
