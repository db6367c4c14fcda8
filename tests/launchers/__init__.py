"""Verification in processes that launchers have started: one machine, and several."""
