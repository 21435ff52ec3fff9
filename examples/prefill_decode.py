"""Two vLLM engines on this machine's CPU: one computes prompts, the other loads their blocks from it and answers.

    python examples/prefill_decode.py --json out.json

A small proxy sends each request to both engines at once, like vLLM's own examples of disaggregated prefill. The decode
engine loads blocks while the prefill engine is still computing the rest of the prompt. For comparison the decode engine
computes the same prompts itself, with another ``cache_salt``, so that it finds none of their blocks.

Each engine has half of the cores, like two machines. vLLM polls while a request waits for another engine, and would
otherwise slow down the prefill for which the request waits.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from serving import Answer, Server, complete, free_port, greedy, working_directory
from tiny_llama import LlamaShape, make_tiny_llama
from vllm_restart import make_prompts, say

_BLOCK_TOKENS = 128
_OUTPUT_TOKENS = 8
_PRIMARY_BYTES = 512 * 2**20
_SECRET = "for this machine only"
_POLL_S = 0.05
_LOADED = "vllm:kv_offload_tiering_read_bytes_total"


@dataclass(slots=True)
class Prefill:
    """Progress of the prefill of a request."""

    began_s: float = 0.0  # Time at which the prompt was sent to it, by ``time.perf_counter``.
    ended_s: float = 0.0  # Time of its answer; 0.0 before.
    began_before: bool = False  # Whether the decode engine had loaded blocks before that time.


class Proxy:
    """Sends each completion to both engines at once, and forwards the decode engine's answer.

    Args:
        prefill: Engine that computes prompts.
        decode: Engine that answers.
        peer_port: Port on which the prefill engine serves blocks.
    """

    def __init__(self, prefill: Server, decode: Server, peer_port: int) -> None:
        self._prefill, self._decode, self._peer_port = prefill, decode, peer_port
        self.last = Prefill()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                proxy._pass_on(self, body)

            def log_message(self, format: str, *args: object) -> None:
                """Log nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stop the proxy."""
        self._server.shutdown()
        self._server.server_close()

    def _pass_on(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        self.last = half = Prefill()
        request_id = uuid.uuid4().hex
        before = loaded_bytes(self._decode)
        computing = threading.Thread(target=self._compute, args=(body, request_id, half, before))
        computing.start()
        source = {"kv_request_id": request_id, "remote_host": "127.0.0.1", "remote_port": self._peer_port}
        asked = {**body, "kv_transfer_params": {"remote_prefiller": source}}
        connection = http.client.HTTPConnection("127.0.0.1", self._decode.port, timeout=300)
        connection.request("POST", "/v1/completions", json.dumps(asked), {"Content-Type": "application/json"})
        response = connection.getresponse()
        handler.send_response(response.status)
        handler.send_header("Content-Type", response.headers["Content-Type"])
        handler.end_headers()
        while data := response.read1(65536):
            handler.wfile.write(data)
            handler.wfile.flush()
        connection.close()
        computing.join()

    def _compute(self, body: dict[str, Any], request_id: str, half: Prefill, before: float) -> None:
        done = threading.Event()

        def watch() -> None:
            while not done.wait(_POLL_S) and not half.began_before:
                # The metric counts only if it was read before the prefill ended.
                loaded = loaded_bytes(self._decode) > before
                half.began_before = loaded and not done.is_set()

        watching = threading.Thread(target=watch)
        watching.start()
        try:
            params = {"kv_transfer_params": {"remote_decoder": {"kv_request_id": request_id}}}
            half.began_s = time.perf_counter()
            # If this engine fails, the other one computes the prompt.
            with suppress(OSError, RuntimeError, http.client.HTTPException):
                complete(self._prefill.port, {**body, "max_tokens": 1, **params})
            half.ended_s = time.perf_counter()
        finally:
            done.set()
            watching.join()


def loaded_bytes(server: Server) -> float:
    """Return the bytes that an engine has loaded from its tiers so far, from its metrics."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    finally:
        connection.close()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(_LOADED))


def main() -> int:
    """Command line; returns 0 if outputs are equal and blocks were loaded while prompts were computed."""
    args = _arguments()
    with working_directory("kvstore-pd-", args.dir) as work:
        report = measure(work, args)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    print_table(report)
    return 0 if report["outputs_equal"] and report["loading_began_before_prefill_ended"] else 1


def measure(work: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Start both engines and the proxy, send the prompts, and return the report."""
    shape = LlamaShape(layers=args.layers, hidden=args.hidden, heads=args.hidden // 64, kv_heads=args.hidden // 192)
    say(f"making a Llama of {shape.layers} layers, width {shape.hidden}, random weights")
    model = make_tiny_llama(work / "model", shape)
    prompts = make_prompts([2 * _BLOCK_TOKENS] + [args.prompt_tokens] * args.runs, shape.vocabulary, args.seed)
    peer_port = free_port()
    with ExitStack() as stack:
        say("starting the prefill engine and the decode engine")
        cores = sorted(os.sched_getaffinity(0))
        half = (len(cores) + 1) // 2
        prefill = start(stack, "prefill", work, model, {"listen": f"127.0.0.1:{peer_port}"}, cores[:half])
        decode = start(stack, "decode", work, model, {"request_peers": [f"127.0.0.1:{peer_port}"]}, cores[-half:])
        prefill.wait_ready()
        decode.wait_ready()
        proxy = Proxy(prefill, decode, peer_port)
        stack.callback(proxy.close)
        recomputed, pulled, prefills, own_ttfts, began = [], [], [], [], []
        for number, prompt in enumerate(prompts):
            body = {"model": decode.model, **greedy(prompt, _OUTPUT_TOKENS)}
            computed = complete(decode.port, {**body, "cache_salt": f"recompute-{number}"})
            asked = time.perf_counter()
            answer = complete(proxy.port, body)
            if not number:
                continue  # The first prompt is short and not measured, because first requests are slow.
            recomputed.append(computed)
            pulled.append(answer)
            prefills.append(proxy.last.ended_s - proxy.last.began_s)
            # Nothing, if the decode engine did not wait for the end of the prefill.
            own_ttfts.append(max(0.0, asked + answer.ttft_s - proxy.last.ended_s))
            began.append(proxy.last.began_before)
            say(
                f"  prompt {number}: recomputed in {computed.ttft_s:.3f} s; the proxy took {answer.ttft_s:.3f} s, "
                f"{own_ttfts[-1]:.3f} s of it after the prefill, {answer.cached_tokens} tokens loaded"
            )
    return make_report(recomputed, pulled, prefills, own_ttfts, began)


def start(stack: ExitStack, name: str, work: Path, model: Path, tier: dict[str, Any], cores: Sequence[int]) -> Server:
    """Start an engine with a peer tier; it is killed when the stack ends."""
    offloading = {
        "spec_name": "KVStoreOffloadingSpec",
        "spec_module_path": "kvstore.vllm",
        "cpu_bytes_to_use": _PRIMARY_BYTES,
        # Long timeouts, because half of a small machine's cores may be slow.
        "secondary_tiers": [{"type": "peer", "secret": _SECRET, "lookup_timeout": 10, "load_timeout": 30, **tier}],
        # Only the proxy's requests reach these engines.
        "tiering": {"allow": ["remote_decoder"]},
    }
    # Several steps per prompt: the blocks of one step are loaded during the next.
    chunks = ("--max-num-batched-tokens", "512") if name == "prefill" else ()
    options: dict[str, Any] = {"block_tokens": _BLOCK_TOKENS, "arguments": chunks, "cores": cores}
    server = Server(name, model, work, offloading=offloading, **options)
    stack.callback(server.kill)
    return server


def make_report(
    recomputed: list[Answer], pulled: list[Answer], prefills: list[float], own_ttfts: list[float], began: list[bool]
) -> dict[str, Any]:
    """Return the content of the JSON file."""
    return {
        "schema": 2,
        "runs": len(pulled),
        "prompt_tokens": pulled[0].prompt_tokens,
        "cached_tokens": min(answer.cached_tokens for answer in pulled),
        "prefill_s": round(statistics.median(prefills), 4),
        "pull_ttft_s": round(statistics.median(own_ttfts), 4),
        "recompute_ttft_s": round(statistics.median(answer.ttft_s for answer in recomputed), 4),
        "proxy_ttft_s": round(statistics.median(answer.ttft_s for answer in pulled), 4),
        "outputs_equal": [answer.text for answer in pulled] == [answer.text for answer in recomputed],
        "loading_began_before_prefill_ended": all(began),
    }


def print_table(report: dict[str, Any]) -> None:
    """Print the report as a table."""
    rows = [
        ("decode engine computes the prompt itself", f"{report['recompute_ttft_s']:.3f} s"),
        ("both engines, through the proxy", f"{report['proxy_ttft_s']:.3f} s"),
        ("  prefill engine's answer", f"{report['prefill_s']:.3f} s"),
        ("  decode engine after that", f"{report['pull_ttft_s']:.3f} s"),
        ("tokens loaded", f"{report['cached_tokens']} of {report['prompt_tokens']}"),
        ("loading began before the prefill ended", "yes" if report["loading_began_before_prefill_ended"] else "NO"),
        ("outputs equal", "yes" if report["outputs_equal"] else "NO"),
    ]
    width = max(len(label) for label, _ in rows)
    print("\nTime to first token")
    for label, value in rows:
        print(f"  {label.ljust(width)}  {value}")
    print(f"\nMedian of {report['runs']} prompts.")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--runs", type=int, default=3, help="prompts; the result is the median")
    parser.add_argument("--prompt-tokens", type=int, default=4000, help="length of each prompt, at most 8000")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768, help="a multiple of 192")
    parser.add_argument("--seed", type=int, default=20261122)
    parser.add_argument("--dir", type=Path, help="directory for models and logs (default: the temporary directory)")
    args = parser.parse_args()
    if args.runs < 1 or not 1024 <= args.prompt_tokens <= 8000 or args.hidden % 192:
        parser.error("expected --runs >= 1, --prompt-tokens 1024 to 8000, --hidden a multiple of 192")
    return args


if __name__ == "__main__":
    sys.exit(main())
