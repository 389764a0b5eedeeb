"""A plain model of how vLLM cuts a prompt into scheduler steps, written from its rule and sharing no code with HiState.

The rule, for a model whose recurrent states live in blocks (``mamba_cache_mode=align``), in vLLM's words:

* a step takes what the budget allows; unless it finishes the prompt it ends on a block boundary, so it may be empty;
* it never runs past the next block boundary when it starts inside a block, past the prompt's last boundary, or past
  the one stop that a connector may arm.
"""

from __future__ import annotations

from collections.abc import Callable


def prompt_end(prompt: int, block: int, drops_last_block: bool = False) -> int:
    """The prompt's last boundary that a resend can resume at, in tokens: one token, or one block, is recomputed."""
    whole = [position for position in range(0, prompt + 1, block) if position < prompt or drops_last_block]
    return max(whole[-1] - block, 0) if drops_last_block else max(whole, default=0)


def step_end(start: int, prompt: int, budget: int, block: int, stop: int, drops_last_block: bool = False) -> int:
    """Where the prefill step that begins at `start` ends; `start` itself when the budget is too small for a block.

    Args:
        start: Tokens computed before the step.
        prompt: Tokens in the prompt.
        budget: Tokens that this step may still take.
        block: Tokens in a block.
        stop: The armed stop, 0 for none.
        drops_last_block: Whether drafting costs the prompt's last block.
    """
    end = min(start + budget, prompt)
    if end < prompt:
        end = end // block * block
    limits = [prompt_end(prompt, block, drops_last_block), stop]
    if start % block:
        limits.append((start // block + 1) * block)
    return max(min([limit for limit in limits if start < limit < end], default=end), start)


def prefill(
    start: int,
    prompt: int,
    block: int,
    budget: Callable[[], int],
    stop: Callable[[int], int],
    drops_last_block: bool = False,
) -> list[int]:
    """Where the steps of a whole prefill end, the last one at `prompt`.

    Args:
        start: Tokens computed before the first step.
        prompt: Tokens in the prompt.
        block: Tokens in a block.
        budget: Called once a step.
        stop: Called with a step's start; the armed stop, 0 for none.
        drops_last_block: Whether drafting costs the prompt's last block.
    """
    ends = []
    while start < prompt:
        end = step_end(start, prompt, budget(), block, stop(start), drops_last_block)
        if end > start:
            ends.append(end)
        start = end
    return ends
