"""R30: a hand-over gives the right tokens in at most twice the time of computing, whatever the prefill engine does.

Method: two real engines and the proxy of ``examples/prefill_decode.py``; at a random moment of each request the prefill
engine goes on, stops (SIGSTOP), pauses, or is killed (SIGKILL) and later started again.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from prefill_decode import Proxy, start
from serving import Server, complete, free_port, greedy
from tiny_llama import LlamaShape, make_tiny_llama
from vllm_restart import make_prompts

from tests.campaign.answers import certain
from tests.campaign.program import failed, passed, rounds

REQUESTS: Final = 200
OUTPUT_TOKENS: Final = 8
SLACK_S: Final = 0.5
"""Time that a proxied request may take beyond twice its computing time: two servers and a proxy share two cores."""


class Prefill:
    """The prefill engine, and what happens to it.

    Args:
        choose: Draws the faults.
        begin: Starts the engine.
    """

    def __init__(self, choose: random.Random, begin: Callable[[], Server]) -> None:
        self.counts: dict[str, int] = {}
        self._choose, self._begin = choose, begin
        self.server: Server = begin()
        self.server.wait_ready()
        self.kind = ""

    def disturb(self, within_s: float) -> threading.Thread:
        """Begin a fault at a random moment of the next seconds."""
        kind = self.kind = self._choose.choices(["nothing", "stop", "pause", "kill"], [4, 3, 2, 1])[0]
        at_s, pause_s = self._choose.uniform(0, within_s), self._choose.uniform(0, within_s)
        if kind == "stop":
            pause_s = 2 * within_s + 1  # Longer than the request may take.
        self.counts[kind] = self.counts.get(kind, 0) + 1

        def act() -> None:
            time.sleep(at_s)
            if kind == "kill":
                self.server.kill()
            elif kind != "nothing":
                pids = self.server.pids
                for number in (signal.SIGSTOP, signal.SIGCONT):
                    for pid in pids:
                        os.kill(pid, number)
                    time.sleep(pause_s if number is signal.SIGSTOP else 0)

        thread = threading.Thread(target=act)
        thread.start()
        return thread

    def mend(self) -> None:
        """Start the engine again if it was killed."""
        if not self.server.pids:
            self.server = self._begin()
            self.server.wait_ready()


def hand_over(seed: int) -> str:
    """Make the requests; return the figure."""
    choose = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="kvstore-r30-") as folder, ExitStack() as stack:
        work = Path(folder)
        model = make_tiny_llama(work / "model", LlamaShape(layers=4, hidden=384, heads=6, kv_heads=2))
        peer_port, cores = free_port(), sorted(os.sched_getaffinity(0))
        half = (len(cores) + 1) // 2
        listen = {"listen": f"127.0.0.1:{peer_port}"}
        prefill = Prefill(choose, lambda: start(stack, "prefill", work, model, listen, cores[:half]))
        decode = start(stack, "decode", work, model, {"request_peers": ["127.0.0.0/8:1024-65535"]}, cores[-half:])
        decode.wait_ready()
        slowest, loaded, calm, calm_loaded = 0.0, 0, 0, 0
        for number in range(REQUESTS + 1):
            prompt = make_prompts([choose.randrange(1000, 4000)], 512, choose.getrandbits(32))[0]
            body = {"model": decode.model, **greedy(prompt, OUTPUT_TOKENS)}
            computed = complete(decode.port, {**body, "cache_salt": f"before-{number}"})
            proxy = Proxy(prefill.server, decode, peer_port)
            fault = prefill.disturb(1.2 * computed.ttft_s)
            answer = complete(proxy.port, body)
            fault.join()
            prefill.mend()
            proxy.close()
            computing_s = computed.ttft_s
            if answer.ttft_s > 2 * computing_s + SLACK_S:
                # Other programs may have begun to use the processor since then.
                computing_s = max(computing_s, complete(decode.port, {**body, "cache_salt": f"after-{number}"}).ttft_s)
            took = f"{answer.ttft_s:.2f} s, computing {computing_s:.2f} s, {answer.cached_tokens} tokens loaded"
            print(f"request {number}: {prefill.kind}, {took}", flush=True)
            if answer.text != computed.text:
                # The order of the sums differs, which may decide between two words that are equally likely.
                _, right = certain(decode.port, {**body, "cache_salt": f"again-{number}"})
                if not all(text.startswith(tuple(right)) for text in (answer.text, computed.text)):
                    failed(f"request {number}, seed {seed}: {answer.text!r} instead of {computed.text!r}")
            if not number:
                continue  # It finds no computing speed measured.
            if answer.ttft_s > 2 * computing_s + SLACK_S:
                failed(f"request {number}, seed {seed}: {took}")
            slowest = max(slowest, answer.ttft_s / computing_s)
            loaded += answer.cached_tokens > 0
            if prefill.kind == "nothing":
                calm, calm_loaded = calm + 1, calm_loaded + (answer.cached_tokens > 0)
        if calm_loaded < calm / 2:
            failed(f"seed {seed}: only {calm_loaded} of {calm} requests without a fault loaded blocks")
        faults = ", ".join(f"{count} {kind}" for kind, count in sorted(prefill.counts.items()))
        return f"{REQUESTS} requests ({faults}), {loaded} loaded blocks, slowest {slowest:.2f} times its computing time"


if __name__ == "__main__":
    for seed in rounds():
        figure = hand_over(seed)
    passed(figure)
