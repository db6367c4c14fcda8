"""What runs in a rank: the one training loop, the shard it reads, and what it writes down."""
