"""The process that holds one vLLM engine and serves it over pipes; the only module here that imports vLLM.

Commands arrive as JSON lines on standard input, events leave as JSON lines on standard output (everything that vLLM
prints goes to standard error). The engine runs inside this very process (no engine-core process, no worker process, no
HTTP): it starts in seconds, one process is all that has to be ended, and a time to first token is vLLM's own, from the
moment the command was read to the step that produced the token.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from typing import Any

Event = dict[str, Any]


class Worker:
    """Steps the engine and answers commands until told to stop or its standard input closes."""

    def __init__(self, arguments: dict[str, Any], out: Any) -> None:
        self._out = out
        self._commands: queue.SimpleQueue[tuple[float, Event]] = queue.SimpleQueue()
        self._requests: dict[str, Event] = {}
        self._running = True
        started = time.monotonic()
        from vllm import SamplingParams
        from vllm.engine.arg_utils import EngineArgs
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.llm_engine import LLMEngine

        self.emit(event="imported", seconds=time.monotonic() - started)
        self._sampling_params = SamplingParams
        self._cumulative = RequestOutputKind.CUMULATIVE
        # Waits for a command, so that whatever the engine connects to can come up while vLLM is being imported.
        first = sys.stdin.readline()
        if not first:
            raise SystemExit(0)
        started = time.monotonic()
        _let_vllm_scan_llvmlite()
        self.engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self.core = self.engine.engine_core.engine_core
        cache = self.engine.vllm_config.cache_config
        self.emit(
            event="ready",
            seconds=time.monotonic() - started,
            block_tokens=cache.block_size,
            blocks=cache.num_gpu_blocks,
        )

    def emit(self, **event: Any) -> None:
        """Write one event."""
        self._out.write(json.dumps(event) + "\n")
        self._out.flush()

    def run(self) -> None:
        """The main loop."""
        threading.Thread(target=self._read, daemon=True).start()
        while self._running:
            # As vLLM's own busy loop: a connector that still stores a finished request needs further steps.
            busy = self.core.scheduler.has_requests()
            self._drain(block=not busy)
            if self._running and self.core.scheduler.has_requests():
                self._step()
        self.engine.engine_core.shutdown()

    def _read(self) -> None:
        for line in sys.stdin:
            self._commands.put((time.monotonic(), json.loads(line)))
        self._commands.put((time.monotonic(), {"op": "stop"}))

    def _drain(self, block: bool) -> None:
        while self._running:
            try:
                received, command = self._commands.get(block=block)
            except queue.Empty:
                return
            block = False
            try:
                self._obey(command, received)
            except Exception as error:
                traceback.print_exc()
                self.emit(event="failed", id=command.get("id"), error=f"{type(error).__name__}: {error}")

    def _obey(self, command: Event, received: float) -> None:
        match command["op"]:
            case "submit":
                self._submit(command, received)
            case "abort":
                self.engine.abort_request([self._requests.pop(command["id"])["internal"]], internal=True)
            case "reset":
                self.emit(event="reset", done=bool(self.engine.reset_prefix_cache()))
            case "call":
                module, _, function = command["target"].partition(":")
                value = getattr(importlib.import_module(module), function)(self.engine, **command["arguments"])
                self.emit(event="called", value=value)
            case "stop":
                self._running = False
            case other:
                raise ValueError(f"unknown command {other!r}")

    def _submit(self, command: Event, received: float) -> None:
        params = self._sampling_params(
            max_tokens=command["max_tokens"],
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            logprobs=command["logprobs"] or None,
            output_kind=self._cumulative,
        )
        self._requests[command["id"]] = {"received": received, "first": None}
        prompt = {"prompt_token_ids": command["prompt"]}
        if "cache_salt" in command:
            prompt["cache_salt"] = command["cache_salt"]
        internal = self.engine.add_request(command["id"], prompt, params)
        self._requests[command["id"]]["internal"] = internal

    def _step(self) -> None:
        outputs = self.engine.step()
        now = time.monotonic()
        if not outputs and not self.core.scheduler.running:
            time.sleep(0.001)  # only waiting for a transfer: leave the core to whoever does it
        for output in outputs:
            request = self._requests.get(output.request_id)
            if request is None:
                continue
            completion = output.outputs[0]
            if request["first"] is None and completion.token_ids:
                request["first"] = now
            if output.finished:
                del self._requests[output.request_id]
                self.emit(
                    event="done",
                    id=output.request_id,
                    tokens=list(completion.token_ids),
                    logprobs=[
                        {str(token): value.logprob for token, value in position.items()}
                        for position in completion.logprobs or []
                    ],
                    cached_tokens=output.num_cached_tokens or 0,
                    ttft_s=(request["first"] or now) - request["received"],
                    seconds=now - request["received"],
                    finish_reason=completion.finish_reason,
                )


def _let_vllm_scan_llvmlite() -> None:
    """Keep vLLM's scan of all loaded modules from failing on llvmlite, which LMCache brings into this process.

    vLLM's CPU build replaces its Triton kernels wherever a module holds one, and asks ``vars(value).get`` of every
    value it meets. llvmlite's library handle answers any attribute, ``__dict__`` included, with a function wrapper.
    With an executor of its own process vLLM scans before LMCache is imported; here both share one process.
    """
    from vllm.triton_utils import dispatcher

    def mapping_of(value: object) -> Mapping[str, Any]:
        names = vars(value)
        return names if isinstance(names, Mapping) else {}

    dispatcher.vars = mapping_of


def main() -> None:
    """Run a worker for the engine arguments (JSON) given as the only command-line argument."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # prints of vLLM and of its libraries must not end up between the events
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        Worker(json.loads(sys.argv[1]), out).run()
    except BaseException as error:
        if not isinstance(error, SystemExit):
            traceback.print_exc()
            out.write(json.dumps({"event": "dead", "error": f"{type(error).__name__}: {error}"}) + "\n")
            out.flush()
        raise


if __name__ == "__main__":
    main()
