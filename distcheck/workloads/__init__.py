"""The yardsticks that strategies are measured with, one file each; each defines `workload`."""
