"""Renders reports: they display verdicts and decide nothing. One file per format, plus live
progress.
"""
