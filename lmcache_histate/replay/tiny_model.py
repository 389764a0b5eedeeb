"""A small random hybrid model (Qwen3-Next architecture) for the demo and the end-to-end tests: nothing is downloaded.

The geometry mirrors Qwen3.5-9B at about one eighth: vLLM aligns its cache to blocks of 64 tokens (528 there) and one
snapshot of the recurrent state weighs as much as 192 tokens of KV (1,572 there), so that the same trade-offs show at
prompts of a few thousand tokens.

Random weights have to be *chosen* for a cache test to mean anything: a wrong restored state must change the answers,
and nothing else may.

* Default initialisation gives the recurrent layers a memory of a few tokens, so a wrong restored state would change
  nothing. The decay rates are therefore spread over a range of half-lives (`HALF_LIFE_TOKENS`).
* The recurrent layers come first. On vLLM's CPU build they and all matrix products give the same bits wherever prefill
  steps are cut (at block boundaries); only attention sums in an order that depends on it. With attention in the
  middle, as in the real model, every later layer amplifies that rounding and one answer in three flips. The inner one
  of the two attention layers contributes little, so that the outer one reads next to exact values.
* No layer chooses experts: a router's top-k choice turns a rounding difference into another expert, hence another
  token. (The architecture insists on one mixture layer; there every expert is taken, weighted.)
* The model answers with a few tokens only. The fewer compete, the rarer two of them are so close that the 8 bits of a
  bfloat16 logit decide.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BLOCK_TOKENS = 64
"""Tokens per cache block to which vLLM aligns this model (attention page = padded recurrent page)."""

HALF_LIFE_TOKENS = (64.0, 8192.0)
"""Shortest and longest half-life, in tokens, of the recurrent heads' memory."""

ANSWER_TOKEN = 66
"""First of the few tokens that the model ever answers with."""

VERSION = 1
"""Raised whenever the weights or the tokenizer change, so that cached folders are rebuilt."""

_MARKER = "tiny_model.json"


@dataclass(frozen=True)
class TinyModelSpec:
    """What distinguishes one tiny model from another.

    Attributes:
        seed: Seed of the random weights.
        vocab_size: Tokens in the vocabulary; at least 258 (256 bytes, begin, end).
        branch_gain: Standard deviation of a layer's contribution to the residual stream, whose input has 1.
        logit_std: Standard deviation of the logits of the tokens that the model answers with.
        attention_gain: Standard deviation of attention scores before the softmax; larger attends to fewer tokens.
        inner_attention_gain: What the first attention layer contributes, relative to all other layers.
        answer_pairs: Half the number of tokens that the model answers with; they come in pairs of opposite logits, so
            that one of them always beats the other tokens, whose logits are 0.
        attention_heads: Query heads of an attention layer; a multiple of `kv_heads`.
        kv_heads: KV heads of an attention layer. Every tensor-parallel rank takes an equal share of both.
    """

    seed: int = 0
    vocab_size: int = 512
    branch_gain: float = 1.5
    logit_std: float = 4.0
    attention_gain: float = 2.0
    inner_attention_gain: float = 0.1
    answer_pairs: int = 4
    attention_heads: int = 10
    kv_heads: int = 5


def ensure_tiny_model(folder: Path, spec: TinyModelSpec | None = None) -> Path:
    """Write the model unless the folder already holds this very one.

    Args:
        folder: Where the model goes; replaced as a whole when it holds another version.
        spec: Which model; the default one if None.

    Returns:
        The folder, which `transformers` and vLLM load as a model and tokenizer.
    """
    spec = spec or TinyModelSpec()
    wanted = {"version": VERSION, "spec": asdict(spec)}
    marker = folder / _MARKER
    try:
        if json.loads(marker.read_text()) == wanted:
            return folder
    except (OSError, ValueError):
        pass
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _write(scratch, spec)
        (scratch / _MARKER).write_text(json.dumps(wanted))
        scratch.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        # A rename, so that a run that was interrupted never leaves half a model under the final name.
        os.replace(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _write(folder: Path, spec: TinyModelSpec) -> None:
    import torch
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        vocab_size=spec.vocab_size,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=8,
        layer_types=["linear_attention"] * 6 + ["full_attention"] * 2,
        num_attention_heads=spec.attention_heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=64,
        partial_rotary_factor=0.25,  # 16 rotary dimensions; vLLM's CPU kernel crashes unless it is a multiple of 16
        linear_conv_kernel_dim=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        num_experts=2,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        decoder_sparse_step=1,
        mlp_only_layers=list(range(7)),
        max_position_embeddings=65536,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    model = Qwen3NextForCausalLM(config)
    generator = torch.Generator().manual_seed(spec.seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            _fill(name, weight, spec, generator)
    model.to(torch.bfloat16).save_pretrained(folder)
    _tokenizer(spec.vocab_size, folder)


def _fill(name: str, weight: torch.Tensor, spec: TinyModelSpec, generator: torch.Generator) -> None:
    """Draw one weight in place, scaled so that every signal in the network has about unit size."""
    import torch

    def normal(std: float) -> None:
        weight.normal_(0.0, std, generator=generator)

    kind = name.removesuffix(".weight").rsplit(".", 1)[-1]
    fan_in = weight.shape[-1]
    branch_gain = spec.branch_gain
    if ".layers.6." in name and kind == "o_proj":
        branch_gain *= spec.inner_attention_gain
    if kind == "A_log":
        weight.zero_()
    elif kind == "dt_bias":
        # Memory after n tokens is exp(-n * softplus(dt_bias + a)), a being small: one half-life per head.
        low, high = (math.log(tokens) for tokens in HALF_LIFE_TOKENS)
        spread = torch.rand(weight.shape, generator=generator) * (high - low) + low
        rate = math.log(2.0) / spread.exp()
        weight.copy_(rate + torch.log(-torch.expm1(-rate)))  # the inverse of softplus
    elif kind == "in_proj_ba":
        normal(0.5 / math.sqrt(fan_in))
    elif kind == "conv1d":
        normal(1.0 / math.sqrt(fan_in))
    elif kind in ("q_norm", "k_norm"):
        weight.fill_(math.sqrt(spec.attention_gain) - 1.0)  # vLLM and transformers add 1
    elif kind in ("input_layernorm", "post_attention_layernorm"):
        weight.zero_()
    elif kind == "norm":
        weight.fill_(1.0 if "linear_attn" in name else 0.0)
    elif kind == "embed_tokens":
        normal(1.0)
    elif kind == "lm_head":
        weight.zero_()
        rows = torch.randn((spec.answer_pairs, fan_in), generator=generator) * (spec.logit_std / math.sqrt(fan_in))
        weight[ANSWER_TOKEN : ANSWER_TOKEN + 2 * spec.answer_pairs] = torch.cat((rows, -rows))
    elif kind in ("out_proj", "o_proj", "down_proj"):
        # Their inputs are products with a gate, of about half the unit size.
        normal(2.0 * branch_gain / math.sqrt(fan_in))
    else:
        normal(1.0 / math.sqrt(fan_in))


def _tokenizer(vocab_size: int, folder: Path) -> None:
    """Write a tokenizer with one token per byte; the tokens beyond are names that no text produces."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"<s>": 0, "</s>": 1}
    for character in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[character] = len(vocab)
    while len(vocab) < vocab_size:
        vocab[f"<x{len(vocab)}>"] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    ).save_pretrained(folder)
