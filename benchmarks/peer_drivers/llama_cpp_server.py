"""Serves one GGUF file with llama.cpp's own HTTP server, inside the environment that holds `xllamacpp`.

Runs with that environment's interpreter and knows nothing of Ropeway. Prints one JSON line with the address once it is
ready, then serves until its standard input closes.
"""

from __future__ import annotations

import argparse
import json
import sys

import xllamacpp


def server_params(options: argparse.Namespace) -> xllamacpp.CommonParams:
    """llama.cpp's parameters: every slot gets `context_tokens`, two pools of threads, no prefix caching of any kind."""
    params = xllamacpp.CommonParams()
    params.model.path = options.model
    params.n_parallel = options.slots
    params.n_ctx = options.slots * options.context_tokens
    params.cpuparams.n_threads = options.threads
    params.cpuparams_batch.n_threads = options.threads
    params.n_batch = options.batch
    params.n_ubatch = options.ubatch
    params.flash_attn_type = getattr(
        xllamacpp.llama_flash_attn_type, f"LLAMA_FLASH_ATTN_TYPE_{options.flash_attention.upper()}"
    )
    kv_type = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{options.kv_type.upper()}")
    params.cache_type_k = kv_type
    params.cache_type_v = kv_type
    params.kv_unified = options.unified_kv
    params.cache_prompt = False
    params.cache_ram_mib = 0
    params.cache_idle_slots = False
    params.slot_prompt_similarity = 0.0
    params.fit_params = False
    params.endpoint_metrics = True
    params.verbosity = 0
    params.port = options.port
    return params


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--slots", type=int, default=32, help="sequences that may run at once")
    parser.add_argument("--context-tokens", type=int, default=1024, help="context of each slot, tokens")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=2048, help="logical batch, tokens")
    parser.add_argument("--ubatch", type=int, default=512, help="physical batch, tokens")
    parser.add_argument("--flash-attention", choices=("auto", "disabled", "enabled"), default="auto")
    parser.add_argument("--kv-type", default="f16")
    parser.add_argument("--unified-kv", action="store_true", help="one KV buffer shared by all slots")
    options = parser.parse_args()
    server = xllamacpp.Server(server_params(options))
    print(json.dumps({"url": server.listening_address, "version": xllamacpp.__version__}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
