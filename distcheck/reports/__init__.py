"""Renders reports. This package displays verdicts; it does not decide them.

brief            the screen of a case or job: verdict, cause, repair, coverage, next command
terminal         all cases in order, and the tables of `--verbose`
failures         causes and the exit status of ranks, as both screens print them
wording          phrases and numbers that all formats share; wrapping: lines and labels
findings         the same screen for a saved report (`merge`, `report`)
json_report      the JSON document and its writer; documents reads it, and checks that it is
                 consistent
html_report      the HTML page, with its pictures/; github, junit, sarif, gitlab: one file per
                 format
files            options such as --json, and the files that they write
live             progress while cases run
"""
