"""How long things take: models and GPUs by name, the time of one scheduler step, and links that serve one transfer at a time.

A step's time is the sum of

- a fixed part: scheduling, launches, sampling (`GPU.step_s`);
- the weights: reading them all once, or the matrix products of the tokens in the step, whichever is longer;
- attention of prefilled tokens, quadratic: each attends to all before it;
- attention of decoded tokens, linear: reading the KV of their contexts, and their recurrent states in and out.

The figures are data sheet values times the share of them that serving engines reach (`COMPUTE_SHARE`, `ATTENTION_SHARE`,
`BANDWIDTH_SHARE`), so absolute times are estimates; what policies are compared by are differences between runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from lmcache_histate.geometry import GIB, KIB, MIB

COMPUTE_SHARE = 0.55
"""Share of the peak FLOPs that dense prefill reaches (published MFU of large batches in bf16 is 0.5 to 0.6)."""
ATTENTION_SHARE = 0.45
"""Share of the peak FLOPs that FlashAttention-3 forward reaches with head dimension 256 and causal masks."""
BANDWIDTH_SHARE = 0.8
"""Share of the memory bandwidth that decoding reaches."""


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes of one model, from its published configuration.

    Attributes:
        parameters: All weights.
        active_parameters: Weights that one token meets.
        kv_bytes_per_token: Over all attention layers, bf16.
        snapshot_bytes: One recurrent state over all recurrent layers.
        attention_flops: FLOPs of one token's attention for each token before it: 4 * layers * query heads * head dimension.
        weight_bytes: Bytes of one weight.
    """

    parameters: float
    active_parameters: float
    kv_bytes_per_token: float
    snapshot_bytes: float
    attention_flops: float
    weight_bytes: float = 2.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """Peak figures of one GPU, from its data sheet.

    Attributes:
        flops: Dense bf16 FLOPs a second.
        bandwidth: Bytes a second from its memory.
        step_s: Fixed seconds of one scheduler step.
    """

    flops: float
    bandwidth: float
    step_s: float = 0.004


MODELS = {
    # 32 layers, 8 with attention: 4 KV heads of 256, 16 query heads; 24 of Gated DeltaNet: 32 x 128 x 128 in fp32 and a
    # convolution of 3 x 8192 in bf16 each.
    "qwen3.5-9b": Model(9e9, 9e9, 32 * KIB, 49.1 * MIB, 4 * 8 * 16 * 256),
    # 48 layers, 12 with attention: 2 KV heads of 256, 16 query heads; 36 of Gated DeltaNet with the sizes above.
    "qwen3-next-80b-a3b": Model(80e9, 3e9, 24 * KIB, 73.7 * MIB, 4 * 12 * 16 * 256, weight_bytes=1.0),
    # 27 layers, 7 with latent attention: 576 values a token, 32 query heads of 192 and 128; 20 of KDA: 32 x 128 x 128 in
    # fp32 and a convolution of 3 x 12288 in bf16 each.
    "kimi-linear-48b-a3b": Model(48e9, 3e9, 7 * 576 * 2, 41.4 * MIB, 2 * 7 * 32 * (192 + 128), weight_bytes=1.0),
}
"""By name. The mixture-of-experts models are taken in fp8, so that they fit one GPU."""

GPUS = {
    "a100": Gpu(312e12, 2.04e12),
    "h100": Gpu(989e12, 3.35e12),
    "h200": Gpu(989e12, 4.8e12),
    "b200": Gpu(2250e12, 8.0e12),
    "l40s": Gpu(362e12, 0.864e12),
}
"""By name."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The cost model of one engine; all in seconds, tokens and bytes. `histate calibrate` can measure the same figures.

    Attributes:
        step_s: Fixed seconds of a step.
        weights_s: Seconds to read the weights once: the least time of a step's matrix products.
        token_s: Seconds of one token's matrix products.
        attention_s: Seconds of one prefilled token's attention for each token before it.
        context_s: Seconds of one decoded token's attention for each token before it.
        state_s: Seconds to read and write one request's recurrent state, for each decoded token.
    """

    step_s: float
    weights_s: float
    token_s: float
    attention_s: float
    context_s: float
    state_s: float

    @classmethod
    def of(cls, model: Model, gpu: Gpu) -> StepTimes:
        """The estimate from published figures."""
        compute, bandwidth = gpu.flops * COMPUTE_SHARE, gpu.bandwidth * BANDWIDTH_SHARE
        return cls(
            step_s=gpu.step_s,
            weights_s=model.parameters * model.weight_bytes / bandwidth,
            token_s=2.0 * model.active_parameters / compute,
            attention_s=model.attention_flops / (gpu.flops * ATTENTION_SHARE),
            context_s=model.kv_bytes_per_token / bandwidth,
            state_s=2.0 * model.snapshot_bytes / bandwidth,
        )

    def prefill(self, start: float, end: float) -> float:
        """Seconds of attention for prefilling positions [start, end), without the matrix products."""
        return self.attention_s * (end * end - start * start) / 2.0

    def step(self, tokens: int, prefill_s: float, decoding: int, contexts: float) -> float:
        """Seconds of one step.

        Args:
            tokens: All tokens in it, prefilled and decoded.
            prefill_s: Sum of `prefill` over its chunks.
            decoding: Requests that decode one token.
            contexts: Sum of their contexts in tokens.
        """
        products = max(self.weights_s, tokens * self.token_s)
        return self.step_s + products + prefill_s + decoding * self.state_s + contexts * self.context_s

    def decode_steps(self, decoding: int, contexts: float, steps: int) -> float:
        """Seconds of `steps` steps in which `decoding` requests decode and nothing else happens. O(1)."""
        first = self.step(decoding, 0.0, decoding, contexts)
        return steps * first + self.context_s * decoding * steps * (steps - 1) / 2.0

    def steps_within(self, decoding: int, contexts: float, seconds: float) -> int:
        """The least number of such steps that takes at least `seconds`, at least 1. O(1)."""
        first = self.step(decoding, 0.0, decoding, contexts)
        growth = self.context_s * decoding / 2.0
        if growth <= 0.0:
            return max(1, int(-(-seconds // first)))
        linear = first - growth
        root = ((linear * linear + 4.0 * growth * max(seconds, 0.0)) ** 0.5 - linear) / (2.0 * growth)
        steps = max(1, int(root))
        while self.decode_steps(decoding, contexts, steps) < seconds:
            steps += 1
        return steps


class Link:
    """A device that serves one transfer after the other: PCIe in one direction, an SSD's reads, its writes.

    Args:
        bytes_per_second: Bandwidth.
        latency_s: Seconds before the first byte of each transfer.
    """

    def __init__(self, bytes_per_second: float, latency_s: float = 0.0) -> None:
        self._rate = bytes_per_second
        self._latency_s = latency_s
        self.free_at = 0.0
        self.nbytes = 0.0
        """Bytes transferred, ever."""

    def transfer(self, nbytes: float, now: float) -> float:
        """Queue a transfer at `now`; returns when it is done. Nothing to transfer takes no time."""
        if nbytes <= 0:
            return now
        self.free_at = max(now, self.free_at) + self._latency_s + nbytes / self._rate
        self.nbytes += nbytes
        return self.free_at


DEFAULT_GPU_BYTES, DEFAULT_CPU_BYTES, DEFAULT_DISK_BYTES = 45.0 * GIB, 96.0 * GIB, 150.0 * GIB
"""The paper's set-up: one H100 with Qwen3.5-9B."""
