"""Flags of llama-server (llama.cpp's tools/server/README.md), and its LLAMA_ARG_ variables."""

from __future__ import annotations

from space_router.foreign_flags import values
from space_router.foreign_flags.flag import ForeignFlag, OtherEngine, Rows, Value

_llama = Rows((OtherEngine.LLAMA_CPP,))

_DEFAULTS = "sampling parameters are fields of a request; defaults are in the checkpoint's generation_config.json"
_SAMPLING = f"{_DEFAULTS}. Send it with each request"
_MAPPED = "how files are read is chosen for the format"
_TEXT_ONLY = "this server takes text only"
_WINDOW = "a sequence that fills the window ends with finish_reason length"

FLAGS: tuple[ForeignFlag, ...] = (
    _llama.row(
        "-hf -hfr --hf-repo",
        "OWNER/NAME or OWNER/NAME:FILE.gguf; a quantisation's name is refused",
        values.hub_file,
        "model",
        variable="LLAMA_ARG_HF_REPO",
    ),
    _llama.refused(
        "-hff --hf-file",
        "the file is named with the repository. Give --model OWNER/NAME:FILE.gguf",
        variable="LLAMA_ARG_HF_FILE",
    ),
    _llama.refused(
        "-mu --model-url",
        "a model comes from a folder, a file or the hub. Fetch it, and give --model FILE",
        variable="LLAMA_ARG_MODEL_URL",
    ),
    _llama.same("-a --alias", "served_model_name", variable="LLAMA_ARG_ALIAS"),
    _llama.row(
        "-c --ctx-size",
        "tokens of one sequence, whatever the number of slots; 0: the checkpoint's window",
        values.context_length,
        "max_model_len",
        variable="LLAMA_ARG_CTX_SIZE",
    ),
    _llama.row(
        "-np --parallel", "as it is; -1 is our default", values.slots, "max_sequences", variable="LLAMA_ARG_N_PARALLEL"
    ),
    _llama.row(
        "-t --threads", "as it is; -1 is our default", values.threads, "num_threads", variable="LLAMA_ARG_THREADS"
    ),
    _llama.nothing("-tb --threads-batch", "--num-threads is for prompts, too"),
    _llama.nothing("--threads-http", "the router is one process", variable="LLAMA_ARG_THREADS_HTTP"),
    _llama.row(
        "-ngl --gpu-layers --n-gpu-layers",
        "0: `cpu`; any other number: the whole model on one device",
        values.gpu_layers,
        "device",
        variable="LLAMA_ARG_N_GPU_LAYERS",
    ),
    _llama.nothing("-b --batch-size", "`-ub` bounds the prompts' part of a step", variable="LLAMA_ARG_BATCH"),
    _llama.row(
        "-ub --ubatch-size",
        "as it is, up to 65536",
        values.prefill_rows,
        "max_prefill_rows",
        variable="LLAMA_ARG_UBATCH",
    ),
    _llama.nothing(
        "--embedding --embeddings",
        "/v1/embeddings is always there",
        value=Value.NONE,
        variable="LLAMA_ARG_EMBEDDINGS",
    ),
    _llama.nothing(
        "--reranking --rerank", "/v1/rerank is always there", value=Value.NONE, variable="LLAMA_ARG_RERANKING"
    ),
    _llama.nothing(
        "-fa --flash-attn", "attention is chosen by --attention", value=Value.OPTIONAL, variable="LLAMA_ARG_FLASH_ATTN"
    ),
    _llama.row(
        "-ctk --cache-type-k",
        "keys have the format of `--dtype`; give `--kv-dtype fp8` on a GPU",
        values.kv_cache,
        "kv_dtype",
        variable="LLAMA_ARG_CACHE_TYPE_K",
    ),
    _llama.row(
        "-ctv --cache-type-v",
        "values have the format of `--dtype`; give `--kv-dtype fp8` on a GPU",
        values.kv_cache,
        "kv_dtype",
        variable="LLAMA_ARG_CACHE_TYPE_V",
    ),
    _llama.nothing("-kvu --kv-unified", "sequences share all pages", value=Value.NONE),
    _llama.nothing("-cb --cont-batching", "requests join at every step", value=Value.NONE),
    _llama.refused(
        "-nocb --no-cont-batching",
        "requests join at every step. Give --max-sequences 1 for one at a time",
        value=Value.NONE,
    ),
    _llama.nothing("--cache-reuse", "shared prefixes are found block by block", variable="LLAMA_ARG_CACHE_REUSE"),
    _llama.nothing("--jinja", "chat templates are Jinja", value=Value.NONE),
    _llama.nothing("--no-jinja", "chat templates are Jinja", value=Value.NONE),
    _llama.same("--chat-template-file", "chat_template", variable="LLAMA_ARG_CHAT_TEMPLATE_FILE"),
    _llama.words(
        "--reasoning-format", "reasoning_parser", {"none": "off", "deepseek": "auto"}, variable="LLAMA_ARG_THINK"
    ),
    _llama.refused(
        "--reasoning-budget",
        "the budget is a request's. Send thinking_token_budget there",
        allowed="-1",
        variable="LLAMA_ARG_THINK_BUDGET",
    ),
    _llama.row("-md --model-draft", "as it is", values.speculative_model, "lookup", "draft_model", "draft_head"),
    _llama.nothing("--draft-max --draft --draft-n", "as many drafts as pay"),
    _llama.nothing("--draft-min", "as many drafts as pay"),
    _llama.row(
        "--offline",
        "`on`, also without a word behind it",
        values.on_off,
        "offline",
        value=Value.OPTIONAL,
        variable="LLAMA_ARG_OFFLINE",
    ),
    _llama.same("--ssl-key-file", "tls_key", variable="LLAMA_ARG_SSL_KEY_FILE"),
    _llama.same("--ssl-cert-file", "tls_cert", variable="LLAMA_ARG_SSL_CERT_FILE"),
    _llama.nothing("--metrics", "/metrics is always there", value=Value.NONE, variable="LLAMA_ARG_ENDPOINT_METRICS"),
    _llama.nothing("--slots", "what runs is on /metrics", value=Value.NONE),
    _llama.nothing("--no-slots", "there is no /slots", value=Value.NONE),
    _llama.nothing(
        "--no-webui --no-ui", "the page has no data of its own, and asks with the user's key", value=Value.NONE
    ),
    _llama.nothing(
        "--no-warmup",
        "a worker measures steps at its first start: --calibration-seconds 0 leaves it out",
        value=Value.NONE,
    ),
    _llama.nothing("--mlock", _MAPPED, value=Value.NONE),
    _llama.nothing("--no-mmap", _MAPPED, value=Value.NONE),
    _llama.nothing("--numa", "run it under `numactl`", variable="LLAMA_ARG_NUMA"),
    _llama.nothing("--no-context-shift", _WINDOW, value=Value.NONE),
    _llama.refused("--context-shift", f"{_WINDOW}. Shorten the conversation in the client", value=Value.NONE),
    _llama.refused("-mm --mmproj", f"{_TEXT_ONLY}. Leave it out", variable="LLAMA_ARG_MMPROJ"),
    _llama.nothing("--no-mmproj", _TEXT_ONLY, value=Value.NONE),
    _llama.refused(
        "-n --predict --n-predict",
        "the number of tokens is a request's. Send max_tokens there",
        allowed="-1",
        variable="LLAMA_ARG_N_PREDICT",
    ),
    _llama.refused("--temp --temperature", _SAMPLING),
    _llama.refused("--top-k", _SAMPLING),
    _llama.refused("--top-p", _SAMPLING),
    _llama.refused("--min-p", _SAMPLING),
    _llama.refused("--repeat-penalty", _SAMPLING),
    _llama.refused("--presence-penalty", _SAMPLING),
    _llama.refused("--frequency-penalty", _SAMPLING),
    _llama.switch("-v --verbose --log-verbose", "log_level", "debug"),
    _llama.row(
        "-lv --verbosity --log-verbosity",
        "0, 1: `error`; 2: `warning`; 3: `info`; more: `debug`",
        values.verbosity,
        "log_level",
        variable="LLAMA_ARG_LOG_VERBOSITY",
    ),
    _llama.switch("--log-disable", "log_level", "error"),
    _llama.refused("--log-file", "the log goes to standard error. Redirect it: 2> FILE", variable="LLAMA_ARG_LOG_FILE"),
    _llama.refused("--slot-save-path", "keys and values are kept in memory: --kv-offload SIZE. Leave it out"),
    _llama.refused(
        "--api-prefix", "routes begin at /. Have the proxy in front remove its prefix", variable="LLAMA_ARG_API_PREFIX"
    ),
    _llama.refused("--path", "only this server's page is served. Have a web server serve yours"),
    _llama.refused("--grammar", "a grammar is a request's. Send it there (`structured_outputs`, `response_format`)"),
)
