"""Worlds that are kept from test to test: `@pytest.mark.world(4, reuse=True)`.

Ranks and process group stay; a test costs a message there and back. What a test changes in its
ranks is put back after it (environment, folder, random state, dtype, threads), a world in which
one failed is thrown away. Fixtures that are not the ranks' own travel there by pickle.
"""

from distcheck.testing.failures import Ended
from distcheck.testing.rank import Prepared


def run(prepared: Prepared) -> Ended:
    """Runs a test in a kept world, which is started if there is none."""
    raise NotImplementedError
