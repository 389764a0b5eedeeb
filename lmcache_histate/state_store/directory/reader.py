"""One question to the directory by someone who takes no part in it: a router, or `histate locate`."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_histate.state_store.directory import scripts
from lmcache_histate.state_store.directory.client import Client, Script
from lmcache_histate.state_store.directory.encoding import Malformed, unpack_facts, unpack_member
from lmcache_histate.state_store.directory.keys import Keys, namespace_tag
from lmcache_histate.state_store.directory.locate import locate
from lmcache_histate.state_store.directory.protocol import Location, Member, NamespaceFacts
from lmcache_histate.state_store.directory.url import DirectoryAddress

_LOOKUP = Script(scripts.LOOKUP)


class DirectoryReader:
    """Asks the server directly: no view, no lease, nothing written. One thread at a time.

    Args:
        address: of the server.
        timeout_s: seconds to wait for an answer.
    """

    def __init__(self, address: DirectoryAddress, timeout_s: float = 2.0) -> None:
        self.client = Client(address, timeout_s)
        self._keys = Keys(address.prefix)

    def namespaces(self) -> dict[str, list[NamespaceFacts]]:
        """Namespaces by name. One name may have several facts, for example while a model's layout changes.

        One round trip. Those where nobody takes part any more are among them for a while.

        Raises:
            DirectoryError: one of its subclasses.
        """
        found: dict[str, list[NamespaceFacts]] = {}
        (answer,) = self.client.pipeline([("HVALS", self._keys.namespaces)])
        for packed in answer:
            try:
                name, facts = unpack_facts(packed)
            except Malformed:
                continue
            found.setdefault(name, []).append(facts)
        return found

    def members(self, namespace: str, facts: NamespaceFacts) -> list[Member]:
        """Instances with a good lease, and shared tiers. One round trip.

        Raises:
            DirectoryError: one of its subclasses.
        """
        leases, _ = self.client.run(_LOOKUP, self._keys.of(namespace_tag(namespace, facts)), b"")
        return sorted(_members(leases).values(), key=lambda member: (member.is_tier, member))

    def locate(self, namespace: str, facts: NamespaceFacts, chunk_hashes: Sequence[bytes]) -> list[Location]:
        """How much of the prompt with these chunks each member can restore; the most first. One round trip.

        Raises:
            DirectoryError: one of its subclasses.
            ValueError: a hash of more than 255 bytes.
        """
        asked = b"".join(bytes((len(chunk_hash),)) + chunk_hash for chunk_hash in chunk_hashes)
        leases, packed = self.client.run(_LOOKUP, self._keys.of(namespace_tag(namespace, facts)), asked)
        records: list[bytes] = []
        at = 0
        while at < len(packed):
            end = at + 2 + int.from_bytes(packed[at : at + 2], "little")
            records.append(packed[at + 2 : end])
            at = end
        return locate(facts, records, _members(leases))

    def close(self) -> None:
        """Disconnect."""
        self.client.close()


def _members(leases: Sequence[bytes]) -> dict[int, Member]:
    members = {}
    for number, lease in zip(leases[::2], leases[1::2], strict=True):
        try:
            members[int(number)] = unpack_member(lease)
        except Malformed:
            continue
    return members
