"""Storage on disk: run folders and bundles, and the code that a replay may run.

run_folder     stores cases, traces and the report of a run; reads saved traces
bundle         a run as one zip file; unpacking: a zip file from elsewhere
origin         date, command and commit of the code; earlier_runs: the cases that failed in their
   last run, and the changes since the last pass
trust          code that a saved run makes distcheck run, and the definition of that code
"""
