"""What the ranks of one world write down as they train, and how it is read again."""
