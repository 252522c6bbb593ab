"""Flags of `vllm serve` (vLLM's pages on the command line and its engine's arguments)."""

from __future__ import annotations

from space_router.foreign_flags import values
from space_router.foreign_flags.flag import ForeignFlag, OtherEngine, Rows, Value

_vllm = Rows((OtherEngine.VLLM,))

_EVERY_TASK = "a model generates and makes embeddings; an encoder beside it is --embedding-model"
_TEXT_ONLY = "this server takes text only"
_PREFIXES = "prefixes are always shared, and the text is the same"
_PIECES = "prompts always go in pieces of --max-prefill-rows"
_QUIET = "no line of the log holds prompts or outputs"
_REQUESTS = "requests have no lines in the log"
_LORAS = "there is no such bound: --lora and --lora-folder say what is served"
_FIT = "one process a GPU, started by the worker"
_CODE = "no code but this package's own is run. Leave it out"

FLAGS: tuple[ForeignFlag, ...] = (
    _vllm.row("MODEL", "the word behind `serve`: a hub id, a folder or a GGUF file", values.hub_file, "model"),
    _vllm.row(
        "--served-model-name",
        "several names, separated by spaces or commas",
        values.names,
        "served_model_name",
        value=Value.MANY,
    ),
    _vllm.row(
        "--tokenizer", "nothing to do for the model's own name and for GGUF files; others are refused", values.tokenizer
    ),
    _vllm.nothing("--tokenizer-mode", "the tokenizer is read from tokenizer.json", only="auto hf fast slow"),
    _vllm.nothing("--tokenizer-revision", "--revision is the tokenizer's, too"),
    _vllm.nothing("--code-revision", "no code of a repository is run"),
    _vllm.nothing("--config-format", "the model's config.json is read", only="auto hf"),
    _vllm.nothing("--load-format", "safetensors and GGUF are read", only="auto hf safetensors gguf bitsandbytes"),
    _vllm.refused("--hf-config-path", "the configuration is the checkpoint's own. Put config.json into its folder"),
    _vllm.refused("--hf-overrides", "the configuration is the checkpoint's own. Edit its config.json", allowed="{}"),
    _vllm.refused("--hf-token", "other processes can read a command line. Set HF_TOKEN, or give --token-file FILE"),
    _vllm.same("--download-dir", "download_folder"),
    _vllm.nothing("--task", _EVERY_TASK, only="auto generate embed embedding score"),
    _vllm.nothing("--runner", _EVERY_TASK, only="auto generate pooling"),
    _vllm.nothing("--model-impl", "families with networks of our own are in server/MODELS.md", only="auto vllm"),
    _vllm.row(
        "--max-model-len",
        "as it is, also with a suffix (32k, 32K); `auto` and -1 are the checkpoint's window",
        values.context_length,
        "max_model_len",
    ),
    _vllm.row("--quantization -q", "as TGI's `--quantize`", values.quantization, "weights"),
    _vllm.row("--tensor-parallel-size -tp", "as it is", lambda value, _: {"tensor_parallel": value}, "tensor_parallel"),
    _vllm.row(
        "--pipeline-parallel-size -pp",
        "1; more is refused: give `--tensor-parallel`",
        values.only_one("layers are not spread over GPUs. Give --tensor-parallel N"),
    ),
    _vllm.row("--data-parallel-size -dp", "as it is", lambda value, _: {"workers": value}, "workers"),
    _vllm.refused(
        "--enable-expert-parallel",
        "experts are not spread over GPUs. Leave it out, with --tensor-parallel N",
        value=Value.NONE,
    ),
    _vllm.nothing("--distributed-executor-backend", _FIT, only="mp uni ray"),
    _vllm.nothing("--disable-custom-all-reduce", "the library's own is used", value=Value.NONE),
    _vllm.nothing("--max-parallel-loading-workers", "workers load one after the other where memory is short"),
    _vllm.row(
        "--gpu-memory-utilization",
        "as it is, of what the GPU has free; nothing to do on a CPU",
        values.gpu_fraction,
        "kv_memory",
    ),
    _vllm.row(
        "--kv-cache-memory-bytes",
        "as it is",
        lambda value, _: {"kv_memory": str(values.whole_number(value))},
        "kv_memory",
    ),
    _vllm.row(
        "--kv-offloading-size", "GiB of host memory", lambda value, _: values.gib("kv_offload", value), "kv_offload"
    ),
    _vllm.nothing("--swap-space", "what a preempted request had is computed again, or kept by --kv-offload"),
    _vllm.refused(
        "--cpu-offload-gb", "weights stay where they are used. Take --weights fp8, or more GPUs", allowed="0"
    ),
    _vllm.same("--block-size", "block_size"),
    _vllm.same("--num-gpu-blocks-override", "num_blocks"),
    _vllm.same("--max-num-seqs", "max_sequences"),
    _vllm.row(
        "--max-num-batched-tokens",
        "as it is, up to 65536; it bounds prompts' part of a step",
        values.prefill_rows,
        "max_prefill_rows",
    ),
    _vllm.nothing("--max-num-partial-prefills", _PIECES),
    _vllm.nothing("--long-prefill-token-threshold", _PIECES),
    _vllm.nothing("--enable-prefix-caching", _PREFIXES, value=Value.NONE),
    _vllm.refused(
        "--no-enable-prefix-caching",
        f"{_PREFIXES}. Leave it out; a request's cache_salt keeps it apart",
        value=Value.NONE,
    ),
    _vllm.nothing("--prefix-caching-hash-algo", "prefixes are compared by a keyed hash"),
    _vllm.nothing("--enable-chunked-prefill", _PIECES, value=Value.NONE),
    _vllm.refused("--no-enable-chunked-prefill", f"{_PIECES}. Give a larger one", value=Value.NONE),
    _vllm.nothing(
        "--scheduling-policy",
        "a request may have a `priority`; among equals the first comes first",
        only="fcfs priority",
    ),
    _vllm.nothing("--async-scheduling", "on a GPU the next step is launched before the last is read", value=Value.NONE),
    _vllm.row("--enforce-eager", "`eager`, on a GPU; nothing to do on a CPU", values.eager, "steps", value=Value.NONE),
    _vllm.nothing("--compilation-config -O", "graphs are captured for the sizes that are served"),
    _vllm.nothing("--cudagraph-capture-sizes", "graphs are captured for the sizes that are served", value=Value.MANY),
    _vllm.nothing("--max-seq-len-to-capture", "graphs are captured for the sizes that are served"),
    _vllm.row(
        "--attention-backend",
        "FLASH_ATTN, TRITON_ATTN, FLASHINFER, TORCH_SDPA by our names; others are refused",
        values.attention,
        "attention",
    ),
    _vllm.row(
        "--speculative-config",
        "method ngram or suffix: `--lookup on`; mtp: `--draft-model mtp`; a model: `--draft-model`; eagle, eagle3: "
        "`--draft-head`; medusa, hydra, dflash and mlp_speculator are refused; the number of drafts is as many as pay",
        values.speculative_config,
        "lookup",
        "draft_model",
        "draft_head",
    ),
    _vllm.row(
        "--speculative-model",
        "`[ngram]`: `--lookup on`; a head of EAGLE: `--draft-head`; a model: `--draft-model`",
        values.speculative_model,
        "lookup",
        "draft_model",
        "draft_head",
    ),
    _vllm.row(
        "--num-speculative-tokens", "0: `off`; nothing to do else: as many as pay", values.num_drafts, "speculation"
    ),
    _vllm.nothing("--ngram-prompt-lookup-max", "how far a lookup looks is measured"),
    _vllm.nothing("--enable-lora", "`--lora` enables it", value=Value.NONE),
    _vllm.row(
        "--lora-modules",
        'NAME=PATH or {"name": …, "path": …}, several separated by spaces',
        values.lora_modules,
        "lora",
        value=Value.MANY,
    ),
    _vllm.nothing("--max-loras", _LORAS),
    _vllm.nothing("--max-lora-rank", _LORAS),
    _vllm.nothing("--max-cpu-loras", _LORAS),
    _vllm.nothing("--enable-auto-tool-choice", "tool calls are always on where a template has tools", value=Value.NONE),
    _vllm.words(
        "--tool-call-parser",
        "tool_call_parser",
        {"qwen3_xml": "qwen3_coder", "llama4_json": "llama3_json", "llama4_pythonic": "pythonic"},
    ),
    _vllm.refused("--tool-parser-plugin", _CODE),
    _vllm.refused("--tool-server", "tools are run by clients. Leave it out"),
    _vllm.words("--reasoning-parser", "reasoning_parser", {"deepseek_v31": "deepseek_v3", "gpt_oss": "openai_gptoss"}),
    _vllm.refused("--reasoning-parser-plugin", _CODE),
    _vllm.nothing("--enable-reasoning", "the chat template says whether a model reasons", value=Value.NONE),
    _vllm.refused("--reasoning-config", "the words around reasoning are the parser's. Leave it out"),
    _vllm.nothing("--chat-template-content-format", "a template gets what it looks for", only="auto"),
    _vllm.nothing("--response-role", "answers have the role assistant", only="assistant"),
    _vllm.words("--generation-config", "generation_config", {"vllm": "off"}),
    _vllm.refused(
        "--override-generation-config", "defaults are the checkpoint's. Edit its generation_config.json", allowed="{}"
    ),
    _vllm.row("--uds", "`unix:PATH`", values.socket_path, "host"),
    _vllm.row("--allowed-origins", "a JSON list", values.origins, "cors_origins"),
    _vllm.nothing("--allowed-methods", "browsers of --cors-origins may use every method"),
    _vllm.nothing("--allowed-headers", "browsers of --cors-origins may send every header"),
    _vllm.nothing("--allow-credentials", "keys come in headers, never in cookies", value=Value.NONE),
    _vllm.same("--ssl-keyfile", "tls_key"),
    _vllm.same("--ssl-certfile", "tls_cert"),
    _vllm.refused("--ssl-ca-certs", "clients show a key, no certificate. Have a proxy ask for certificates"),
    _vllm.nothing(
        "--enable-ssl-refresh", "a renewed certificate is shown from the next handshake on", value=Value.NONE
    ),
    _vllm.refused("--root-path", "routes begin at /. Have the proxy in front remove its prefix"),
    _vllm.refused("--middleware", _CODE),
    _vllm.nothing("--disable-log-requests --no-enable-log-requests", _REQUESTS, value=Value.NONE),
    _vllm.nothing("--enable-log-requests", f"{_QUIET}; with --tracing on each request has a span", value=Value.NONE),
    _vllm.nothing("--disable-log-stats", "figures are on /metrics, none in the log", value=Value.NONE),
    _vllm.row(
        "--uvicorn-log-level",
        "`critical` is `error`, `trace` is `debug`; others as they are",
        values.log_level,
        "log_level",
    ),
    _vllm.nothing("--disable-uvicorn-access-log", _REQUESTS, value=Value.NONE),
    _vllm.nothing("--max-log-len", _QUIET),
    _vllm.nothing("--max-logprobs", "a request may ask for up to 20"),
    _vllm.nothing("--guided-decoding-backend", "grammars have one implementation"),
    _vllm.nothing("--structured-outputs-config", "grammars have one implementation"),
    _vllm.nothing("--enable-prompt-tokens-details", "usage always says how many tokens were cached", value=Value.NONE),
    _vllm.nothing("--enable-request-id-headers", "every answer has X-Request-Id", value=Value.NONE),
    _vllm.nothing("--enable-server-load-tracking", "load is on /metrics", value=Value.NONE),
    _vllm.refused(
        "--otlp-traces-endpoint",
        "spans go over http/protobuf. Give --tracing on, and OTEL_EXPORTER_OTLP_ENDPOINT=http://HOST:4318",
    ),
    _vllm.nothing("--limit-mm-per-prompt", _TEXT_ONLY),
    _vllm.nothing("--mm-processor-kwargs", _TEXT_ONLY),
    _vllm.nothing("--language-model-only", _TEXT_ONLY, value=Value.NONE),
    _vllm.nothing(
        "--disable-frontend-multiprocessing", "router and workers are processes of their own", value=Value.NONE
    ),
    _vllm.nothing("--api-server-count", "one router serves all workers"),
    _vllm.nothing("--num-scheduler-steps", "on a GPU steps do not wait for the host"),
    _vllm.nothing("--use-v2-block-manager", "there is one page pool", value=Value.NONE),
    _vllm.nothing(
        "--disable-sliding-window", "layers with a window keep it; the text is the model's", value=Value.NONE
    ),
    _vllm.refused("--enable-sleep-mode", "a worker keeps its memory. Stop it, and start it again", value=Value.NONE),
    _vllm.refused(
        "--logits-processors", f"{_CODE}; requests have bad_words, logit_bias and grammars", value=Value.MANY
    ),
    _vllm.refused(
        "--skip-tokenizer-init",
        "prompts and answers are texts here. Leave it out; prompts may be ids, too",
        value=Value.NONE,
    ),
    _vllm.refused("--config", "there is no file of flags. Give them as flags, or as SPACESERVE_ variables"),
)
