"""Ids that are given out once."""

import copy
from concurrent.futures import ThreadPoolExecutor

from linnet import ids


def test_each_id_is_new():
    give = ids.UUIDManager()
    with ThreadPoolExecutor(4) as pool:
        given = list(pool.map(lambda _: give(), range(100)))
    assert {i.id for i in given} == set(range(1, 101))


def test_a_copy_is_another_id():
    one = ids.uuid()
    assert len({one, copy.copy(one), copy.deepcopy(one)}) == 3
    assert one == ids.FlaxId(one.id) != 5
    assert repr(ids.FlaxId(3)) == "FlaxId(3)"
