"""Parents of chunks: found whichever of store and parent is reported first, and remembered while they are met."""

from __future__ import annotations

import pytest

from lmcache_histate.backends import chains
from lmcache_histate.backends.chains import Chains, Link
from lmcache_histate.backends.events import Chained
from lmcache_histate.backends.layout import Namespace
from lmcache_histate.geometry import CacheGeometry
from lmcache_histate.state_store.tree import PrefixTree

ALICE = Namespace("m", 1, "alice")


def test_whichever_comes_first() -> None:
    tree = PrefixTree()
    space = tree.add_namespace(ALICE.name, CacheGeometry(64, 1.0, 1.0))
    known = Chains(None)
    assert known.stored(ALICE, [b"b"], tree, space) == []
    assert known.chained(Chained([b"a", b"b"], None, 0, 1.0)) == [Link(ALICE, b"a", [b"b"])]
    assert known.stored(ALICE, [b"a", b"b"], tree, space) == [Link(ALICE, None, [b"a"]), Link(ALICE, b"a", [b"b"])]


def test_what_is_met_again_is_remembered_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chains, "MAX_CHUNKS", 4)
    tree = PrefixTree()
    space = tree.add_namespace(ALICE.name, CacheGeometry(64, 1.0, 1.0))
    known = Chains(None)
    known.chained(Chained([b"system"], None, 0, 1.0))
    for number in range(20):  # every session begins with the same prompt, and one of them stores it anew at the end
        known.chained(Chained([b"system", f"s{number}".encode()], None, 0, 1.0))
    assert known.stored(ALICE, [b"system"], tree, space) == [Link(ALICE, None, [b"system"])]
    for number in range(3):
        known.chained(Chained([f"t{number}".encode()], b"x", 64, 1.0))
        known.stored(ALICE, [b"system"], tree, space)
    assert known.stored(ALICE, [b"system"], tree, space) == [Link(ALICE, None, [b"system"])]
    assert known.stored(ALICE, [b"s0"], tree, space) == []
