"""What a run of a workload gave, and whether its outputs are right. Pure; JSON in and out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

LOGPROB_TOLERANCE = 0.9
"""How far two log-probabilities (nats) may lie apart and still be rounding, for the default tiny model.

Restoring what was prefilled is next to exact there (largest difference 0.08 over a whole workload). Restoring the KV and
the state that *decoding* wrote is not: vLLM decodes with other kernels than it prefills with, and over 150 answers the
difference reached 0.74. A state of another prompt moved some token by at least 1.08, and by 4 in the median. Equal
tokens alone prove less than equal probabilities do.
"""


@dataclass(frozen=True)
class RequestOutcome:
    """One request of a run.

    Attributes:
        index: Its step in the script.
        session: Its session.
        kind: Why it was sent.
        prompt_tokens: Length of its prompt.
        known_tokens: Leading prompt tokens that were sent or received before.
        hit_tokens: Prompt tokens that vLLM did not compute.
        ttft_s: Seconds to the first token.
        seconds: Seconds to the last token.
        tokens: Output token ids.
        logprobs: Per output token, the log-probabilities of the most likely ones.
    """

    index: int
    session: str
    kind: str
    prompt_tokens: int
    known_tokens: int
    hit_tokens: int
    ttft_s: float
    seconds: float
    tokens: tuple[int, ...]
    logprobs: tuple[Mapping[int, float], ...] = ()

    @property
    def recomputed_tokens(self) -> int:
        """Prompt tokens that were computed although they had been sent or received before. New tokens are no loss."""
        return max(0, self.known_tokens - self.hit_tokens)


@dataclass(frozen=True)
class RunOutcome:
    """A workload on one back end.

    Attributes:
        backend: Its name.
        requests: In the order of the script.
        start_s: Seconds that the engine took to start.
        run_s: Seconds of the workload.
        facts: Anything else worth keeping.
    """

    backend: str
    requests: tuple[RequestOutcome, ...]
    start_s: float
    run_s: float
    facts: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """A JSON object without the log-probabilities."""
        value = asdict(self)
        for request in value["requests"]:
            del request["logprobs"]
        return value


@dataclass(frozen=True)
class Verdict:
    """How the outputs of one run compare with the reference.

    Attributes:
        equal: Requests whose output tokens are the same.
        rounding: Requests whose tokens differ, first at a place where the reference itself was undecided.
        wrong: Steps whose outputs no rounding explains.
        largest_difference: Largest distance (nats) between two log-probabilities that should be equal.
    """

    equal: int
    rounding: tuple[int, ...]
    wrong: tuple[int, ...]
    largest_difference: float


def compare_outputs(
    run: Sequence[RequestOutcome], reference: Sequence[RequestOutcome], tolerance: float = LOGPROB_TOLERANCE
) -> Verdict:
    """Judge a run by the reference; both must have served the same prompts.

    Up to and including the first token that differs both computed the same distribution, so all log-probabilities that
    both report must agree within the tolerance, and each run's token must be as likely as the other's within it.
    Behind that token they answer different texts and there is nothing to compare.

    Args:
        run: The run to judge.
        reference: What it should have given.
        tolerance: Nats.
    """
    equal, rounding, wrong, largest = 0, [], [], 0.0
    wanted = {request.index: request for request in reference}
    for request in run:
        other = wanted[request.index]
        difference = output_difference(request, other)
        largest = max(largest, difference)
        if difference > tolerance or len(request.tokens) != len(other.tokens):
            wrong.append(request.index)
        elif request.tokens == other.tokens:
            equal += 1
        else:
            rounding.append(request.index)
    return Verdict(equal, tuple(rounding), tuple(wrong), largest)


def output_difference(run: RequestOutcome, reference: RequestOutcome) -> float:
    """The largest distance in nats between log-probabilities that two runs of one prompt should agree on.

    Args:
        run: One run.
        reference: The other.

    Returns:
        0 for equal outputs; infinity where tokens differ and one of them is not even among the other's most likely.
    """
    largest = 0.0
    for position, (mine, theirs) in enumerate(zip(run.tokens, reference.tokens, strict=False)):
        ours = run.logprobs[position] if position < len(run.logprobs) else {}
        others = reference.logprobs[position] if position < len(reference.logprobs) else {}
        for token in ours.keys() & others.keys():
            largest = max(largest, abs(ours[token] - others[token]))
        if mine != theirs:
            for distribution, chosen, foreign in ((others, theirs, mine), (ours, mine, theirs)):
                if chosen not in distribution or foreign not in distribution:
                    return float("inf")
                largest = max(largest, distribution[chosen] - distribution[foreign])
            break
    return largest
