"""Add-ons: optional packages, listed in `distcheck/registry.py`, which the core never imports."""
