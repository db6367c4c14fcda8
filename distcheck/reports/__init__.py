"""Reports: they show verdicts and decide nothing. One file a format, plus live progress."""
