"""Storage on disk: run folders and bundles, and consent to run the code of a saved run.

run_folder     stores cases, traces and the report of a run; reads saved traces
bundle         a run as one zip file; unpacking: safe extraction of a zip file
origin         date, command and commit of the code
earlier_runs   cases that failed most recently, and the changes since the last pass
trust          decides if the code that a saved run names may run
"""
