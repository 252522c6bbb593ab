"""Flags of text-generation-launcher (its docs/source/reference/launcher.md), and the variables with their names."""

from __future__ import annotations

from space_router.foreign_flags import values
from space_router.foreign_flags.flag import ForeignFlag, OtherEngine, Rows, Value

_tgi = Rows((OtherEngine.TGI,))

_NO_TUNNEL = "no tunnel is opened from here. Run `ngrok http PORT` beside the server"
_BATCHING = "prompts join the running batch at the next step, in pieces, without a pause of the others"

FLAGS: tuple[ForeignFlag, ...] = (
    _tgi.row("--model-id", "a hub id, a folder or a GGUF file", values.hub_file, "model", variable="MODEL_ID"),
    _tgi.row(
        "--num-shard", "as it is", lambda value, _: {"tensor_parallel": value}, "tensor_parallel", variable="NUM_SHARD"
    ),
    _tgi.row(
        "--sharded",
        "`false` is one GPU; `true` without `--num-shard` takes all",
        values.shards,
        "tensor_parallel",
        variable="SHARDED",
    ),
    _tgi.row(
        "--quantize",
        "awq, gptq, marlin, compressed-tensors: `auto`, for the checkpoint says it; eetq, bitsandbytes: `int8` on a "
        "CPU, `fp8` on a GPU; bitsandbytes-nf4, -fp4: `int4`, on a CPU; fp8: on a GPU; exl2 is refused",
        values.quantization,
        "weights",
        variable="QUANTIZE",
    ),
    _tgi.row(
        "--speculate",
        "0: `off`; any other number: `auto`, as many drafts as pay, from the text itself too",
        values.speculate,
        "speculation",
        variable="SPECULATE",
    ),
    _tgi.row(
        "--max-input-tokens --max-input-length",
        "as it is",
        lambda value, _: {"max_prompt_tokens": value},
        "max_prompt_tokens",
        variable="MAX_INPUT_TOKENS MAX_INPUT_LENGTH",
    ),
    _tgi.row("--max-total-tokens", "as it is", values.context_length, "max_model_len", variable="MAX_TOTAL_TOKENS"),
    _tgi.row(
        "--max-batch-prefill-tokens",
        "as it is, up to 65536: longer prompts go through several steps",
        values.prefill_rows,
        "max_prefill_rows",
        variable="MAX_BATCH_PREFILL_TOKENS",
    ),
    _tgi.row(
        "--max-batch-total-tokens",
        "divided by `--block-size` (16), rounded up",
        values.blocks_for,
        "num_blocks",
        variable="MAX_BATCH_TOTAL_TOKENS",
    ),
    _tgi.same("--max-batch-size", "max_sequences", variable="MAX_BATCH_SIZE"),
    _tgi.row(
        "--max-concurrent-requests",
        "less `--max-sequences` (64, on a GPU 256) for each worker: those run, others may wait; of fewer all run",
        values.concurrent_requests,
        "max_queue",
        "max_sequences",
        variable="MAX_CONCURRENT_REQUESTS",
    ),
    _tgi.same("--max-best-of", "max_choices", variable="MAX_BEST_OF"),
    _tgi.same("--max-stop-sequences", "max_stop_strings", variable="MAX_STOP_SEQUENCES"),
    _tgi.nothing("--max-top-n-tokens", "a request may ask for up to 20", variable="MAX_TOP_N_TOKENS"),
    _tgi.nothing(
        "--max-client-batch-size", "`--max-choices` bounds the prompts of a request", variable="MAX_CLIENT_BATCH_SIZE"
    ),
    _tgi.same("--payload-limit", "max_body", variable="PAYLOAD_LIMIT"),
    _tgi.nothing("--waiting-served-ratio", _BATCHING, variable="WAITING_SERVED_RATIO"),
    _tgi.nothing("--max-waiting-tokens", _BATCHING, variable="MAX_WAITING_TOKENS"),
    _tgi.nothing("--validation-workers", "prompts are checked in threads of the router", variable="VALIDATION_WORKERS"),
    _tgi.row(
        "--hostname",
        "an address as it is; a name that is no address is left out, as TGI does",
        values.hostname,
        "host",
        variable="HOSTNAME",
    ),
    _tgi.same("-p", "port"),
    _tgi.nothing("--shard-uds-path", "router and workers choose sockets of their own", variable="SHARD_UDS_PATH"),
    _tgi.nothing("--master-addr", "ranks of a worker are on one machine", variable="MASTER_ADDR"),
    _tgi.nothing("--master-port", "ranks of a worker choose a port themselves", variable="MASTER_PORT"),
    _tgi.same(
        "--huggingface-hub-cache --weights-cache-override",
        "download_folder",
        variable="HUGGINGFACE_HUB_CACHE WEIGHTS_CACHE_OVERRIDE",
    ),
    _tgi.nothing(
        "--disable-custom-kernels",
        "kernels are chosen for the device that there is",
        value=Value.NONE,
        variable="DISABLE_CUSTOM_KERNELS",
    ),
    _tgi.row(
        "--cuda-memory-fraction",
        "as it is, of what the GPU has free; nothing to do on a CPU",
        values.gpu_fraction,
        "kv_memory",
        variable="CUDA_MEMORY_FRACTION",
    ),
    _tgi.row(
        "--cuda-graphs",
        "`0`: `eager`, on a GPU; sizes: nothing to do, for they are chosen at start",
        values.graphs,
        "steps",
        variable="CUDA_GRAPHS",
    ),
    _tgi.refused(
        "--rope-factor",
        "positions are scaled as the checkpoint says. Set rope_scaling in its config.json",
        variable="ROPE_FACTOR",
    ),
    _tgi.switch("--json-output", "log_format", "json", variable="JSON_OUTPUT"),
    _tgi.refused(
        "--otlp-endpoint",
        "spans go over http/protobuf, TGI's over gRPC. Give --tracing on, and OTEL_EXPORTER_OTLP_ENDPOINT=http://HOST:4318",
        variable="OTLP_ENDPOINT",
    ),
    _tgi.nothing("--otlp-service-name", "OTEL_SERVICE_NAME names the service", variable="OTLP_SERVICE_NAME"),
    _tgi.row("--cors-allow-origin", "as it is", values.origins, "cors_origins", variable="CORS_ALLOW_ORIGIN"),
    _tgi.nothing("--watermark-gamma", "requests with `watermark` are refused", variable="WATERMARK_GAMMA"),
    _tgi.nothing("--watermark-delta", "requests with `watermark` are refused", variable="WATERMARK_DELTA"),
    _tgi.refused("--ngrok", _NO_TUNNEL, value=Value.NONE, variable="NGROK"),
    _tgi.refused("--ngrok-authtoken", _NO_TUNNEL, variable="NGROK_AUTHTOKEN"),
    _tgi.refused("--ngrok-edge", _NO_TUNNEL, variable="NGROK_EDGE"),
    _tgi.refused(
        "--tokenizer-config-path",
        "the tokenizer's settings are the checkpoint's own. For another chat template give --chat-template FILE",
        variable="TOKENIZER_CONFIG_PATH",
    ),
    _tgi.nothing(
        "--disable-grammar-support",
        "grammars stay on; a worker compiles them in bounded time",
        value=Value.NONE,
        variable="DISABLE_GRAMMAR_SUPPORT",
    ),
    _tgi.refused("--env -e", "this command only serves. Run `spaceserve doctor` with the same flags", value=Value.NONE),
    _tgi.row(
        "--lora-adapters",
        "each FOLDER becomes FOLDER=FOLDER, NAME=FOLDER stays",
        values.lora_adapters,
        "lora",
        variable="LORA_ADAPTERS",
    ),
    _tgi.nothing("--usage-stats", "none are collected", variable="USAGE_STATS"),
    _tgi.nothing(
        "--enable-prefill-logprobs",
        "a request may always ask for them",
        value=Value.NONE,
        variable="ENABLE_PREFILL_LOGPROBS",
    ),
)
