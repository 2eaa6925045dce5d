"""Reading ahead in another thread."""

import gc
import threading

import pytest

from linnet.training.prefetch_iterator import PrefetchIterator


def test_elements_come_in_order():
    ahead = PrefetchIterator(iter(range(20)), 3)
    assert iter(ahead) is ahead
    assert (next(ahead), list(ahead)) == (0, list(range(1, 20)))
    with pytest.raises(StopIteration):
        next(ahead)


def test_it_reads_no_further_than_asked():
    asked, gate = [], threading.Event()

    def items():
        for i in range(10):
            asked.append(i)
            if i == 2:
                gate.set()
            yield i

    ahead = PrefetchIterator(items(), 2)
    assert gate.wait(5)  # two are ready, and the third is at hand
    assert asked == [0, 1, 2]
    ahead.close()


def test_errors_come_in_their_place():
    def items():
        yield 1
        raise KeyError("x")

    ahead = PrefetchIterator(items())
    assert next(ahead) == 1
    with pytest.raises(KeyError, match="x"):
        next(ahead)
    with pytest.raises(StopIteration):
        next(ahead)


def test_closing_ends_it():
    ahead = PrefetchIterator(iter(range(1000)), 2)
    next(ahead)
    ahead.close()
    assert len(list(ahead)) <= 3


def test_dropping_it_ends_the_thread():
    before = threading.active_count()
    ahead = PrefetchIterator(iter(range(1000)), 2)
    next(ahead)
    thread = next(t for t in threading.enumerate() if t.name.endswith("(read_all)"))
    del ahead
    gc.collect()
    thread.join(5)
    assert threading.active_count() <= before


def test_a_buffer_holds_something():
    with pytest.raises(ValueError, match="at least 1 element ready, but got buffer_size=0"):
        PrefetchIterator([], 0)
