"""A module with a global variable, as people's code has them."""

COUNT = 0
