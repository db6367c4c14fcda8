"""Runs a verification, from planned cases to a report; `run` is the main sequence.

preparation, inspection   data, an inspection of the strategy, calibration
case_run                  the state of a case: facts, results so far
session                   runs worlds one after the other, with concurrent judges
report_builder, verdicts  the report of each case, and of the run
followups                 reruns after a known kind of failure
given_objects             strategies that are passed as objects, also from a notebook
merging                   merges the reports of several parts
"""
