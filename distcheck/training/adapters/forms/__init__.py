"""One file per form; see `distcheck.training.adapters` for what it has."""
