"""Our side of an engine process: start it, send requests, read results."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmcache_histate.replay.processes import ProcessScope, StartError, child_environment, log_tail
from lmcache_histate.replay.tiny_model import BLOCK_TOKENS


class EngineDied(RuntimeError):
    """The engine's process ended in the middle of a run; the message holds the end of its log."""


@dataclass(frozen=True)
class EngineSettings:
    """One vLLM engine on CPU.

    Attributes:
        model: Folder of the model.
        block_tokens: Tokens per cache block, as vLLM aligns them for this model. It must be given on CPU: without it
            the scheduler cuts prefill elsewhere and recurrent states are lost.
        blocks: Blocks in vLLM's own pool; None lets vLLM decide.
        max_model_len: Longest sequence in tokens.
        max_step_tokens: Tokens of prefill and decode in one step.
        max_running: Requests in one step.
        threads: OpenMP threads.
        kv_transfer: `kv_transfer_config` of the connector; None for none.
        environment: More environment variables.
        arguments: More vLLM engine arguments, which win over those above.
    """

    model: Path
    block_tokens: int = BLOCK_TOKENS
    blocks: int | None = None
    max_model_len: int = 16384
    max_step_tokens: int = 2048
    max_running: int = 8
    threads: int = 1
    kv_transfer: Mapping[str, Any] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def engine_arguments(self) -> dict[str, Any]:
        """The keyword arguments of vLLM's `EngineArgs`."""
        arguments: dict[str, Any] = {
            "model": str(self.model),
            "block_size": self.block_tokens,
            "max_model_len": self.max_model_len,
            "max_num_batched_tokens": self.max_step_tokens,
            "max_num_seqs": self.max_running,
            "enable_prefix_caching": True,
            # Compiling takes a minute and gains nothing at this size.
            "enforce_eager": True,
            "distributed_executor_backend": "uni",
            "disable_log_stats": True,
        }
        if self.blocks is not None:
            arguments["num_gpu_blocks_override"] = self.blocks
        if self.kv_transfer is not None:
            arguments["kv_transfer_config"] = dict(self.kv_transfer)
        return arguments | dict(self.arguments)


@dataclass(frozen=True)
class Completion:
    """What the engine says about one request.

    Attributes:
        tokens: Output token ids.
        logprobs: Per output token: token id -> log-probability, for the most likely tokens that were asked for.
        cached_tokens: Prompt tokens that were not computed, as vLLM reports them.
        ttft_s: Seconds from submission to the first output token.
        seconds: Seconds from submission to the last output token.
        finish_reason: As vLLM gives it, ``length`` normally.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[dict[int, float], ...]
    cached_tokens: int
    ttft_s: float
    seconds: float
    finish_reason: str | None


class EngineProcess:
    """An engine in a process of its own. Not thread-safe."""

    def __init__(self, scope: ProcessScope, settings: EngineSettings, log: Path) -> None:
        """Start the process; `connect` must follow.

        Args:
            scope: Ends it.
            settings: The engine.
            log: File for everything vLLM prints.
        """
        self._scope = scope
        self.settings = settings
        self.log = log
        self.facts: dict[str, Any] = {}
        scratch = log.parent / f"{log.stem}-tmp"  # vLLM leaves rendezvous files in the temporary folder
        scratch.mkdir(parents=True, exist_ok=True)
        environment = child_environment(
            {
                "OMP_NUM_THREADS": str(settings.threads),
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "TMPDIR": str(scratch),
                # The sampler would compile its log-probability rank with a C++ compiler at the first request: 20 s.
                "TORCHDYNAMO_DISABLE": "1",
                **settings.environment,
            }
        )
        argv = [
            *(sys.executable, "-m", "lmcache_histate.replay.engine_worker"),
            json.dumps(settings.engine_arguments()),
        ]
        self.process = scope.start(argv, log, environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._number = 0
        self._early: list[dict[str, Any]] = []

    def connect(self, before_build: Callable[[], object] | None = None) -> dict[str, Any]:
        """Wait until the engine accepts requests.

        Args:
            before_build: Called when vLLM has been imported and before the engine is built: the moment to wait for
                servers that started alongside.

        Returns:
            Facts: seconds of import and build, block size in tokens, number of blocks.

        Raises:
            StartError: It did not start.
        """
        try:
            imported = self._expect("imported")
            if before_build is not None:
                before_build()
            self._send({"op": "build"})
            ready = self._expect("ready")
        except EngineDied as error:
            raise StartError(str(error)) from None
        self.facts = {
            "import_s": imported["seconds"],
            "build_s": ready["seconds"],
            "block_tokens": ready["block_tokens"],
            "blocks": ready["blocks"],
        }
        return self.facts

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        logprobs: int = 0,
        request_id: str | None = None,
        cache_salt: str = "",
    ) -> str:
        """Send a request (greedy) and return at once.

        Args:
            prompt: Token ids.
            max_tokens: Output tokens; there are never fewer.
            logprobs: Most likely tokens to report for each output token.
            request_id: Its name; made up if None.
            cache_salt: The tenant; requests of different tenants share no cache.

        Returns:
            The name.
        """
        self._number += 1
        name = request_id or f"request-{self._number}"
        command = {"op": "submit", "id": name, "prompt": list(prompt), "max_tokens": max_tokens, "logprobs": logprobs}
        self._send(command | ({"cache_salt": cache_salt} if cache_salt else {}))
        return name

    def next_completion(self) -> tuple[str, Completion]:
        """Wait for whichever request finishes next.

        Raises:
            EngineDied: The process ended.
            RuntimeError: vLLM refused a request.
        """
        event = self._expect("done")
        logprobs = tuple({int(token): value for token, value in position.items()} for position in event["logprobs"])
        return event["id"], Completion(
            tuple(event["tokens"]),
            logprobs,
            event["cached_tokens"],
            event["ttft_s"],
            event["seconds"],
            event["finish_reason"],
        )

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int, logprobs: int = 0) -> list[Completion]:
        """Send all prompts at once and wait for all.

        Args:
            prompts: Token ids of each.
            max_tokens: Output tokens of each.
            logprobs: Most likely tokens to report for each output token.

        Returns:
            Their completions, in the order of the prompts.
        """
        names = [self.submit(prompt, max_tokens, logprobs) for prompt in prompts]
        done: dict[str, Completion] = {}
        while len(done) < len(names):
            name, completion = self.next_completion()
            done[name] = completion
        return [done[name] for name in names]

    def abort(self, request_id: str) -> None:
        """Abort a request; it will not complete."""
        self._send({"op": "abort", "id": request_id})

    def reset_prefix_cache(self) -> bool:
        """Empty vLLM's own prefix cache (not the connector's); False while a block is still in use."""
        self._send({"op": "reset"})
        return bool(self._expect("reset")["done"])

    def call(self, target: str, **arguments: Any) -> Any:
        """Call a function inside the engine's process, between two steps.

        Args:
            target: ``module:function``; it gets vLLM's `LLMEngine` and the arguments, and must return JSON.
            arguments: Keyword arguments, JSON.
        """
        self._send({"op": "call", "target": target, "arguments": arguments})
        return self._expect("called")["value"]

    def stop(self, timeout_s: float = 20.0) -> None:
        """Shut the engine down in order (the connector says goodbye to its server), then end the process.

        Args:
            timeout_s: Seconds for the orderly part.
        """
        self._scope.pids()
        if self.process.stdin is not None and not self.process.stdin.closed:
            self.process.stdin.close()
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        self._scope.stop(self.process)

    def _send(self, command: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(command).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None

    def _expect(self, kind: str) -> dict[str, Any]:
        for index, early in enumerate(self._early):
            if early["event"] == kind:
                return self._early.pop(index)
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            event: dict[str, Any] = json.loads(line)
            if event["event"] == kind:
                return event
            if event["event"] == "failed":
                raise RuntimeError(f"vLLM refused {event['id'] or 'a command'}: {event['error']}; log: {self.log}")
            if event["event"] == "dead":
                break
            self._early.append(event)  # a request that finished while something else was asked
        raise self._died()

    def _died(self) -> EngineDied:
        return EngineDied(f"the engine process ended; end of {self.log}:\n{log_tail(self.log)}")
