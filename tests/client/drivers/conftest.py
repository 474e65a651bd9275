"""Ways to reach a server, as fixtures."""

from __future__ import annotations

import pytest

from support.ways import WAYS, Way


@pytest.fixture(params=WAYS, ids=repr)
def way(request: pytest.FixtureRequest) -> Way:
    """Each driver, over plain sockets and over TLS."""
    way: Way = request.param
    return way


@pytest.fixture(params=[way for way in WAYS if way.carrier.keeps], ids=repr)
def keeping(request: pytest.FixtureRequest) -> Way:
    """Those that keep connections."""
    keeping: Way = request.param
    return keeping
