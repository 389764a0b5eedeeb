"""Where the longest restorable prefix of a prompt is, for routers that send a request to where its prefix lives.

    from lmcache_histate.backends.locate import Locator

    with Locator("redis://meta:6379/0") as locator:
        answer = locator.locate("Qwen/Qwen3.5-9B", token_ids)
    best = answer.locations[0].member.address if answer.locations else None

A server answers the same question about its own view at ``POST /histate/locate`` (`backends.http_api`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import TracebackType
from typing import Any

from lmcache.v1.multiprocess.token_hasher import TokenHasher

from lmcache_histate.backends.layout import Namespace
from lmcache_histate.state_store.directory.protocol import DirectoryError, Location, NamespaceFacts
from lmcache_histate.state_store.directory.url import parse_directory_url

MAX_CHUNKS = 7000
"""Chunks of a prompt that are looked at, as many as the directory takes in one question."""
MAX_TOKEN = (1 << 32) - 1
"""Largest token id that LMCache can hash."""


class LocateError(ValueError):
    """The question cannot be answered as it was asked. The message says what to ask instead."""


@dataclass(frozen=True)
class Answer:
    """How much of a prompt every member can restore.

    Attributes:
        namespace: Model, world size and salt.
        chunk_tokens: Tokens of one chunk: the resolution of every figure.
        chunks: Whole chunks of the prompt that were looked at.
        locations: Those who can restore something, the most first; shared tiers among them.
        age_s: Seconds since what was answered from was current.
    """

    namespace: Namespace
    chunk_tokens: int
    chunks: int
    locations: tuple[Location, ...]
    age_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain values, as ``histate locate --json`` and the HTTP interface show them."""
        return {
            "model": self.namespace.model_name,
            "world_size": self.namespace.world_size,
            "cache_salt": self.namespace.cache_salt,
            "chunk_tokens": self.chunk_tokens,
            "prompt_tokens": self.chunks * self.chunk_tokens,
            "age_s": round(self.age_s, 3),
            "locations": [
                {
                    "name": location.member.name,
                    "address": location.member.address,
                    "shared_tier": location.member.is_tier,
                    "cpu_tokens": location.cpu_tokens,
                    "disk_tokens": location.disk_tokens,
                    "tokens": location.tokens,
                }
                for location in self.locations
            ],
        }


@cache
def _hasher(chunk_tokens: int) -> TokenHasher:
    return TokenHasher(chunk_tokens)


def chunk_hashes_of(token_ids: Sequence[int], chunk_tokens: int) -> list[bytes]:
    """LMCache's rolling hashes of the whole chunks of a prompt, at most ``MAX_CHUNKS``. O(tokens).

    Raises:
        LocateError: Something that is no token id.
    """
    token_ids = list(token_ids[: MAX_CHUNKS * chunk_tokens])
    for place, token in enumerate(token_ids):
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token <= MAX_TOKEN:
            raise LocateError(
                f"{token!r}, number {place} of the prompt, is not a token id. Give whole numbers from 0 on."
            )
    hashes: list[bytes] = _hasher(chunk_tokens).compute_chunk_hashes(token_ids)
    return hashes


def choose_namespace(
    known: Mapping[str, Sequence[NamespaceFacts]], model: str, cache_salt: str, world_size: int | None
) -> Namespace:
    """The one namespace that is meant.

    Args:
        known: Namespaces of the directory, by name.
        model: As vLLM names it: what was given as ``--model``.
        cache_salt: Tenant; empty for none.
        world_size: Ranks that share a prompt's KV; None if there is only one choice.

    Raises:
        LocateError: None, or several.
    """
    namespaces = [Namespace.of_name(name) for name in known]
    of_model = [space for space in namespaces if space.model_name == model]
    if not of_model:
        models = sorted({space.model_name for space in namespaces})
        listed = f"Known are {', '.join(models)}." if models else "No model is: nothing was served so far."
        raise LocateError(f"the model {model!r} is not known. {listed}")
    of_salt = [space for space in of_model if space.cache_salt == cache_salt]
    if not of_salt:
        raise LocateError(
            f"nothing of {model!r} was cached with the cache salt {cache_salt!r}. "
            "Give the salt that the requests carry, or none if they carry none."
        )
    chosen = [space for space in of_salt if world_size in (None, space.world_size)]
    sizes = sorted(space.world_size for space in of_salt)
    if not chosen:
        raise LocateError(f"{model!r} runs with a world size of {' and '.join(map(str, sizes))}, not {world_size}.")
    if len(chosen) > 1:
        raise LocateError(
            f"{model!r} runs with world sizes of {' and '.join(map(str, sizes))}. Say which one is meant."
        )
    return chosen[0]


def answer(
    known: Mapping[str, Sequence[NamespaceFacts]],
    locate: Callable[[str, NamespaceFacts, Sequence[bytes]], Sequence[Location]],
    model: str,
    token_ids: Sequence[int] | None = None,
    chunk_hashes: Sequence[bytes] | None = None,
    cache_salt: str = "",
    world_size: int | None = None,
    age_s: float = 0.0,
) -> Answer:
    """Answer one question from whatever knows namespaces and locates hashes; see `Locator.locate`."""
    if (token_ids is None) == (chunk_hashes is None):
        raise LocateError("give either the token ids or the chunk hashes of the prompt.")
    namespace = choose_namespace(known, model, cache_salt, world_size)
    found: dict[str, Location] = {}
    chunk_tokens = chunks = 0
    for facts in known[namespace.name]:
        # A layout that is on its way out may still be listed: whoever has more counts.
        hashes = chunk_hashes_of(token_ids, facts.block_tokens) if token_ids is not None else list(chunk_hashes or ())
        hashes = hashes[:MAX_CHUNKS]
        locations = locate(namespace.name, facts, hashes) if hashes else ()
        if locations or not chunk_tokens:
            chunk_tokens, chunks = facts.block_tokens, len(hashes)
        for location in locations:
            if location.member.name not in found or found[location.member.name].tokens < location.tokens:
                found[location.member.name] = location
    ranked = sorted(found.values(), key=lambda one: (-one.tokens, -one.disk_tokens, -one.cpu_tokens, one.member))
    return Answer(namespace, chunk_tokens, chunks, tuple(ranked), age_s)


class Locator:
    """Asks the directory's server. Takes no part in the fleet and writes nothing. One thread at a time.

    Args:
        directory: URL of the directory, as in the setting ``histate.directory``.
        timeout_s: Seconds to wait for an answer.

    Raises:
        ValueError: A malformed URL.
        ModuleNotFoundError: The redis package is missing.
    """

    def __init__(self, directory: str, timeout_s: float = 2.0) -> None:
        # Not above: servers answer from their own view, and need the redis package only with histate.directory.
        from lmcache_histate.state_store.directory.reader import DirectoryReader

        self._reader = DirectoryReader(parse_directory_url(directory), timeout_s)
        self._known: dict[str, list[NamespaceFacts]] = {}

    def locate(
        self,
        model: str,
        token_ids: Sequence[int] | None = None,
        *,
        chunk_hashes: Sequence[bytes] | None = None,
        cache_salt: str = "",
        world_size: int | None = None,
    ) -> Answer:
        """How much of a prompt every instance, and every shared tier by itself, can restore.

        One round trip, and one more for a model that was not asked for before.

        Args:
            model: As vLLM names it: what was given as ``--model``.
            token_ids: The prompt's tokens; or
            chunk_hashes: LMCache's rolling hashes of its whole chunks, from its start.
            cache_salt: Tenant of the request; empty for none.
            world_size: Tensor-parallel ranks that share a prompt's KV; needed only if the fleet runs several.

        Raises:
            LocateError: A question that cannot be answered.
            DirectoryError: The directory cannot be used now (``Unreachable``, ``AccessDenied``, ...).
        """
        question = (model, token_ids, chunk_hashes, cache_salt, world_size)
        if self._known:
            try:
                # An empty answer may only mean that the model's layout has changed since.
                if (found := answer(self._known, self._reader.locate, *question)).locations:
                    return found
            except LocateError:
                pass
        self._known = self._reader.namespaces()
        return answer(self._known, self._reader.locate, *question)

    def close(self) -> None:
        """Disconnect."""
        self._reader.close()

    def __enter__(self) -> Locator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


__all__ = ["Answer", "DirectoryError", "LocateError", "Locator", "answer", "choose_namespace", "chunk_hashes_of"]
