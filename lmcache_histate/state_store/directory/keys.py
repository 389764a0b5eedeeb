"""Names of the directory's keys."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from lmcache_histate.state_store.directory.encoding import SCHEMA, pack_facts
from lmcache_histate.state_store.directory.protocol import NamespaceFacts


@dataclass(frozen=True, slots=True)
class Keys:
    """All keys of one fleet begin with `prefix`, so that several fleets and other users can share a server.

    Attributes:
        prefix: as `?prefix=` of the directory's URL says.
    """

    prefix: str = "histate"

    @property
    def schemas(self) -> str:
        """Set of the schema versions that were ever used."""
        return f"{self.prefix}:schemas"

    def schema(self, version: int) -> str:
        """Exists while somebody uses that schema version."""
        return f"{self.prefix}:schema:{version}"

    @property
    def namespaces(self) -> str:
        """Hash of the namespaces' facts by their tags."""
        return f"{self.prefix}:{SCHEMA}:namespaces"

    def of(self, tag: str) -> str:
        """Prefix of a namespace's keys. The braces make Redis Cluster keep them together."""
        return f"{self.prefix}:{SCHEMA}:{{{tag}}}"


def namespace_tag(namespace: str, facts: NamespaceFacts) -> str:
    """Name of a namespace in keys: 16 hex digits over its name and facts."""
    return hashlib.blake2b(pack_facts(namespace, facts), digest_size=8).hexdigest()
