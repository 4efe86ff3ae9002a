"""The table of ids and slots, against a plain list."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from knnper.datastore.index import NOTHING, SlotTable


def test_the_last_ids_move_into_the_holes() -> None:
    table = SlotTable(np.array([5, 3, 9, 4, 8]))
    movers, holes = table.close_up(np.array([3, 8]))
    assert movers.tolist() == [3]
    assert holes.tolist() == [1]
    assert table.by_slot.tolist() == [5, 4, 9]
    assert table.slots_of(np.array([9, 4, 5])).tolist() == [2, 1, 0]


def test_vacated_slots_stay_empty() -> None:
    table = SlotTable(np.array([5, 3, 9]))
    table.vacate(np.array([5]))
    table.append(np.array([4]))
    assert table.by_slot.tolist() == [NOTHING, 3, 9, 4]
    assert table.slots_of(np.array([4, 3, 9])).tolist() == [3, 1, 2]
    assert table.ids_at(np.array([[1, -1]])).tolist() == [[3, NOTHING]]


def test_an_id_takes_sixteen_bytes() -> None:
    assert SlotTable(np.arange(100)).num_bytes == 1600


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_slots_follow_any_order_of_changes(data: st.DataObject) -> None:
    table, expected = SlotTable(np.empty(0, np.int64)), list[int]()
    for _ in range(data.draw(st.integers(1, 6))):
        fresh = sorted(set(range(50)) - set(expected))
        added = data.draw(st.lists(st.sampled_from(fresh), max_size=8, unique=True))
        table.append(np.array(added, np.int64))
        expected += added
        gone = data.draw(st.sets(st.sampled_from(expected))) if expected else set()
        contents = np.array(expected, np.int64)
        movers, holes = table.close_up(np.array(sorted(gone), np.int64))
        contents[holes] = contents[movers]
        expected = contents[: len(expected) - len(gone)].tolist()
        assert table.by_slot.tolist() == expected
        slots = table.slots_of(np.array(sorted(expected), np.int64))
        assert table.by_slot[slots].tolist() == sorted(expected)
