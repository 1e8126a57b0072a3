"""What the tests with real servers share."""

import pytest

from tests.helpers.openenv_servers import Servers


@pytest.fixture(scope="package")
def servers():
    """The process from which all servers fork."""
    running = Servers()
    yield running
    running.close()
