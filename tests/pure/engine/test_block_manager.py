"""The block pool and the names of blocks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engine.kv.block_manager import BlockPool
from actors.engine.kv.prefix import PrefixChain, block_hash, root_hash


def chain(tokens: list[int], salt: str = "", size: int = 4) -> list[bytes]:
    made = PrefixChain(salt, size)
    made.extend(tokens)
    return made.hashes


def test_names_are_fixed_for_all_time() -> None:
    """A name must be the same in every process and on every machine."""
    assert block_hash(b"\0" * 32, [1, 256]).hex() == "9baa5e20cd24f6a578eea3e12f10cf78b585ba8f4572e9c745fbc84f405dd15e"


def test_names_cover_full_blocks_only_and_the_whole_front() -> None:
    assert chain([1, 2, 3]) == []
    assert len(chain([1, 2, 3, 4, 5, 6, 7])) == 1
    first, second = chain([1, 2, 3, 4, 5, 6, 7, 8])
    assert chain([1, 2, 3, 4, 9, 9, 9, 9])[0] == first
    assert chain([9, 2, 3, 4, 5, 6, 7, 8])[1] != second


def test_salts_share_no_name() -> None:
    assert not set(chain(list(range(16)), "a")) & set(chain(list(range(16)), "b"))
    assert root_hash("a") != root_hash("")
    assert root_hash("a", 1) != root_hash("a")


def test_a_chain_grows_as_if_made_at_once() -> None:
    grown = PrefixChain("s", 4)
    for length in range(20):
        grown.extend(list(range(length)))
    assert grown.hashes == chain(list(range(19)), "s")


def test_a_freed_sequence_is_evicted_from_its_end() -> None:
    pool, names = BlockPool(4), chain(list(range(12)))
    blocks = pool.allocate(range(3))
    for block, name in zip(blocks, names, strict=True):
        pool.register(block, name)
    pool.free(blocks)
    pool.allocate(range(2))  # the blank one, then one eviction
    assert pool.lookup(names) == blocks[:2]
    pool.check()


def test_the_longest_unused_is_evicted_first() -> None:
    pool = BlockPool(2)
    old, new = chain([1] * 4), chain([2] * 4)
    a, b = pool.allocate(range(2))
    pool.register(a, old[0])
    pool.register(b, new[0])
    pool.free([b])
    pool.free([a])
    pool.acquire(pool.lookup(new))  # used again: now the younger one
    pool.free([b])
    pool.allocate(range(1))
    assert pool.lookup(old) == []
    assert pool.lookup(new) == [b]


def test_a_shared_block_outlives_its_first_owner() -> None:
    pool, names = BlockPool(2), chain([7] * 4)
    (block,) = pool.allocate(range(1))
    pool.register(block, names[0])
    pool.acquire(pool.lookup(names))
    pool.free([block])
    assert pool.allocate(range(1)) != [block]
    assert pool.num_available == 0
    pool.free([block])
    assert pool.num_available == pool.num_cached == 1


def test_a_duplicate_goes_back_blank() -> None:
    pool, names = BlockPool(2), chain([7] * 4)
    for block in pool.allocate(range(2)):
        pool.register(block, names[0])
    pool.free([0])
    pool.free([1])
    assert (pool.num_cached, pool.num_blank) == (1, 1)
    pool.check()


def test_misuse_is_our_own_fault_and_stops() -> None:
    pool = BlockPool(1)
    with pytest.raises(AssertionError, match=r"places range\(0, 2\), 1 available"):
        pool.allocate(range(2))
    blocks = pool.allocate(range(1))
    pool.free(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["take", "free"]), st.integers(0, 3), st.integers(0, 9)), max_size=60),
    st.sampled_from([1, 2, 4]),
)
def test_no_block_is_lost_and_none_in_use_is_touched(operations: list[tuple[str, int, int]], owners: int) -> None:
    """Sequences of four kinds of content come and go; what a holder wrote stays as it was while it holds."""
    pool, held, content = BlockPool(8 // owners, owners), [], dict[int, tuple[int, int]]()
    for operation, kind, which in operations:
        if operation == "free" and held:
            pool.free(held.pop(which % len(held)))
        elif operation == "take":
            names = chain([kind] * 12)
            hits = pool.lookup(names)
            assert all(content[block] == (kind, i) for i, block in enumerate(hits)), "a hit holds something else"
            needed = range(len(hits), 3)
            if pool.has_room(needed, hits):
                pool.acquire(hits)
                fresh = pool.allocate(needed)
                in_use = {block for blocks in held for block in blocks} | set(hits)
                assert not in_use & set(fresh), "a block in use was handed out"
                blocks = hits + fresh
                assert [block % owners for block in blocks] == [place % owners for place in range(3)]
                for i, block in enumerate(blocks):
                    content[block] = (kind, i)
                    pool.register(block, names[i])
                held.append(blocks)
        pool.check()
    for blocks in held:
        pool.free(blocks)
    pool.check()
    assert pool.num_available == 8


def test_every_owner_has_its_own_blocks() -> None:
    pool = BlockPool(2, owners=3)
    first = pool.allocate(range(4))
    assert first == [0, 1, 2, 3]
    assert pool.has_room(range(4, 6))
    assert not pool.has_room(range(3, 4), growing=[6]), "owner 0 is full, however much the others have"
    assert not pool.has_room(range(4, 8))
    pool.free(first)
    pool.check()
    assert pool.has_room(range(6))
    assert not pool.has_room(range(7))


def test_a_hit_that_is_cached_is_not_counted_as_room_of_its_owner() -> None:
    pool, names = BlockPool(1, owners=2), chain([5] * 8)
    for block, name in zip(pool.allocate(range(2)), names, strict=True):
        pool.register(block, name)
    pool.free([0, 1])
    hits = pool.lookup(names)
    assert pool.has_room(range(1, 2), hits[:1])
    assert not pool.has_room(range(2, 3), hits)
