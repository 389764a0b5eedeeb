"""A scripted agent workload: interleaved coding sessions that append, rewind, fork and reset.

Pure: a script is fixed by its seed, and only the answers of the model are filled in while it runs. Answers have a fixed
length, so every position in the script is known before the first request.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

FIRST_TOKEN = 2
LAST_TOKEN = 257
"""Text tokens of the tiny model's byte tokenizer."""


class Kind(StrEnum):
    """Why a request was sent."""

    FIRST = "first"
    APPEND = "append"
    REWIND = "rewind"
    FORK = "fork"
    RESET = "reset"


@dataclass(frozen=True)
class Step:
    """One request of the script.

    Attributes:
        index: Position in the script.
        session: Which conversation it continues; a fork names the new one.
        kind: Why.
        source: Conversation whose beginning is kept; the session itself except for forks.
        keep: Tokens kept of the source's conversation (its prompts and answers so far).
        new: Token ids appended after what is kept.
        answer_tokens: Tokens that the model answers.
        known: Leading prompt tokens that any earlier request has sent or received: no cache can hit more.
    """

    index: int
    session: str
    kind: Kind
    source: str
    keep: int
    new: tuple[int, ...]
    answer_tokens: int
    known: int

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return self.keep + len(self.new)


@dataclass(frozen=True)
class WorkloadSpec:
    """The shape of a workload; lengths in tokens.

    Attributes:
        seed: Fixes everything.
        sessions: Conversations that run at the same time.
        turns: Requests of each, the first included.
        system_tokens: System prompt, the same for all sessions.
        first_tokens: Shortest and longest first message (the files that an agent reads at the start).
        turn_tokens: Shortest and longest later message or tool result.
        answer_tokens: Tokens of every answer.
        rewind_share: Share of later turns that rewind.
        forks: Sessions that split off from a common prefix, spread over the run.
        fork_turns: Requests of each fork.
        resets: Sessions that start anew in the middle of the run.
    """

    seed: int = 0
    sessions: int = 5
    turns: int = 11
    system_tokens: int = 768
    first_tokens: tuple[int, int] = (4096, 7168)
    turn_tokens: tuple[int, int] = (192, 1280)
    answer_tokens: int = 24
    rewind_share: float = 0.35
    forks: int = 4
    fork_turns: int = 3
    resets: int = 1


MINIATURE = WorkloadSpec(
    sessions=2, turns=4, system_tokens=256, first_tokens=(512, 768), turn_tokens=(96, 192), answer_tokens=8, forks=1,
    fork_turns=2, rewind_share=0.5,
)  # fmt: skip
"""A workload of seconds, for tests."""


@dataclass
class _Conversation:
    """Lengths only: where each message of a conversation begins and how long it is now."""

    length: int
    starts: list[int] = field(default_factory=list)


def make_script(spec: WorkloadSpec) -> list[Step]:
    """Write the script.

    Args:
        spec: Its shape.

    Returns:
        Steps in the order in which they are sent. A step comes after the one whose answer its prompt contains.
    """
    return list(_Script(spec).steps())


class _Script:
    def __init__(self, spec: WorkloadSpec) -> None:
        self._spec = spec
        self._random = random.Random(spec.seed)
        self._system = self._text(spec.system_tokens)
        self._conversations: dict[str, _Conversation] = {}
        self._index = 0
        self._system_sent = False

    def _text(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(count))

    def steps(self) -> Iterator[Step]:
        spec = self._spec
        rounds: list[list[str]] = [[f"session-{number}" for number in range(spec.sessions)] for _ in range(spec.turns)]
        # Forks leave when there is something to fork from, and interleave with everybody else from then on.
        earliest = max(1, spec.turns // 3)
        births = {
            f"fork-{number}": earliest + number * max(1, spec.turns - earliest) // max(1, spec.forks)
            for number in range(spec.forks)
        }
        for name, birth in births.items():
            for turn in range(birth, birth + spec.fork_turns):
                while turn >= len(rounds):
                    rounds.append([])
                rounds[turn].append(name)
        reset_turns = {
            f"session-{number % spec.sessions}": spec.turns // 2 + number // spec.sessions
            for number in range(spec.resets)
        }
        for turn, members in enumerate(rounds):
            self._random.shuffle(members)
            for name in members:
                if name not in self._conversations:
                    yield self._fork(name) if name in births else self._first(name, Kind.FIRST)
                elif reset_turns.get(name) == turn:
                    yield self._first(name, Kind.RESET)
                elif self._random.random() < spec.rewind_share:
                    yield self._rewind(name)
                else:
                    yield self._append(name)

    def _step(self, session: str, kind: Kind, source: str, keep: int, new: tuple[int, ...], known: int) -> Step:
        conversation = self._conversations.setdefault(session, _Conversation(0))
        if session != source:
            conversation.starts = [start for start in self._conversations[source].starts if start < keep]
        conversation.starts = [start for start in conversation.starts if start < keep] + [keep]
        conversation.length = keep + len(new) + self._spec.answer_tokens
        step = Step(self._index, session, kind, source, keep, new, self._spec.answer_tokens, known)
        self._index += 1
        return step

    def _first(self, name: str, kind: Kind) -> Step:
        known = len(self._system) if self._system_sent else 0
        self._system_sent = True
        new = self._system + self._text(self._random.randint(*self._spec.first_tokens))
        return self._step(name, kind, name, 0, new, known)

    def _append(self, name: str) -> Step:
        keep = self._conversations[name].length
        return self._step(
            name, Kind.APPEND, name, keep, self._text(self._random.randint(*self._spec.turn_tokens)), keep
        )

    def _rewind(self, name: str) -> Step:
        """Edit an earlier place: everything behind it is dropped, the edit is appended."""
        keep = self._inside(name)
        return self._step(
            name, Kind.REWIND, name, keep, self._text(self._random.randint(*self._spec.turn_tokens)), keep
        )

    def _fork(self, name: str) -> Step:
        parent = self._random.choice(list(self._conversations))
        keep = self._inside(parent)
        return self._step(
            name, Kind.FORK, parent, keep, self._text(self._random.randint(*self._spec.turn_tokens)), keep
        )

    def _inside(self, name: str) -> int:
        """A position in a conversation, uniform over what lies behind the system prompt."""
        conversation = self._conversations[name]
        return self._random.randint(len(self._system) + 1, conversation.length - 1)


class Transcripts:
    """The conversations of one run, filled with the answers that the model gave."""

    def __init__(self) -> None:
        self._texts: dict[str, list[int]] = {}

    def prompt(self, step: Step) -> list[int]:
        """The prompt of a step; every step that it follows must have been answered.

        Args:
            step: The next step of its session.
        """
        text = self._texts.get(step.source, [])
        if len(text) < step.keep:
            raise ValueError(f"step {step.index} keeps {step.keep} tokens of {step.source}, which has {len(text)}")
        return text[: step.keep] + list(step.new)

    def answered(self, step: Step, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Take note of an answer.

        Args:
            step: Its step.
            prompt: What `prompt` returned.
            answer: Token ids; as many as the step asks for.

        Raises:
            ValueError: The answer has another length, so that the script's positions would no longer hold.
        """
        if len(answer) != step.answer_tokens:
            raise ValueError(
                f"step {step.index} was answered with {len(answer)} tokens instead of {step.answer_tokens}"
            )
        self._texts[step.session] = [*prompt, *answer]


def ready_steps(waiting: Sequence[Step], running: set[str]) -> Step | None:
    """The next step that may be sent: the first whose conversation and source nobody works on.

    Args:
        waiting: Steps not yet sent, in order.
        running: Sessions with a request in flight.

    Returns:
        The step, or None while all must wait.
    """
    blocked = set(running)
    for step in waiting:
        if step.session not in blocked and step.source not in blocked:
            return step
        # What follows in this session, or forks from it, must not overtake.
        blocked.add(step.session)
        blocked.add(step.source)
    return None
