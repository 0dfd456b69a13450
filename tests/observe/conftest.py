"""What the tests of the dashboard share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.helpers.dashboard import DashboardServer, a_browser, a_node


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with a_browser() as browser:
        yield browser


@pytest.fixture
def node() -> Iterator[DashboardServer]:
    with a_node() as node:
        yield node
