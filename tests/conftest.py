"""What `make test-fast` leaves out besides tests that are marked as slow."""

from collections import Counter

import pytest

MANY, EACH = 20, 5
"""Of a test with more cases than this, `make test-fast` runs every fifth: with lists of parameters whose lengths are no
multiples of 5, all their members are met."""


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark most cases of tests with many of them as slow."""
    names = [item.nodeid.partition("[")[0] for item in items]
    cases, seen = Counter(names), Counter()
    for name, item in zip(names, items, strict=True):
        if cases[name] > MANY and seen[name] % EACH:
            item.add_marker("slow")
        seen[name] += 1
