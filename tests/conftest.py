"""What holds for all tests."""

import gc


def pytest_collection_finish() -> None:
    """Leave what is loaded by now out of every later search for garbage.

    Modules and thousands of collected tests stay to the end anyway; looking through
    them took a part of each test's time.
    """
    gc.collect()
    gc.freeze()
