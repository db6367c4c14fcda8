"""The story of a verification, from planned cases to a report; `run` tells it in order.

preparation, inspection   data, a look at the strategy, calibration
case_run                  a case on its way: what was found out of it, and what is known by now
session                   worlds one after the other, judges beside them
book, verdicts            what becomes of each case, and the report
followups                 what is run once more after a known failure
given_objects             strategies that are objects, and those of a notebook
merging                   the reports of several parts as one
"""
