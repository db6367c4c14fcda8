"""What is kept on disk: run folders, bundles, and which code a replay may run.

run_folder     cases before they run, traces and the report after; saved_traces: read again
bundle         a run as one zip; unpacking: one that comes from elsewhere
origin         date, command and state of the code; earlier_runs: which cases failed when they were
               last run, and what has changed since the last pass
trust          which code a saved run makes distcheck run; own_objects: where that is defined
"""
