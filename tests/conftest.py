"""What holds for all tests."""

import gc


def pytest_collection_finish() -> None:
    """Leave what is loaded by now out of every later search for garbage."""
    gc.collect()
    gc.freeze()
