"""Settings of the whole test suite."""

from hypothesis import HealthCheck, settings

# Worlds are real processes on shared machines: no example may fail for being slow.
settings.register_profile(
    "distcheck", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("distcheck")

pytest_plugins = ["pytester"]
