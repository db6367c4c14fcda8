"""What is kept on disk: run folders, bundles, and which code a replay may run."""
