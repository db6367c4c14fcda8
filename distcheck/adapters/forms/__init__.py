"""One file per form; see `distcheck.adapters` for what it has."""
