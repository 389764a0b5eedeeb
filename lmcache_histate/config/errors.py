"""The one exception of this package: a configuration that cannot be used, explained to the person who wrote it."""

from __future__ import annotations

from collections.abc import Sequence


class ConfigError(ValueError):
    """A configuration is wrong; the message names file, line, key, what is wrong and what to do.

    ``problems`` holds one text per problem, so that a file with three mistakes needs one round, not three.
    """

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[str, ...]]]:
        # vLLM moves start-up errors between processes; the default pickling would lose `problems`.
        return (ConfigError, (self.problems,))
