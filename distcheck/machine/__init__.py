"""What this computer has, and the settings and arithmetic that change bits."""
