"""How values of other engines' flags are translated, where a table row needs more than a word for a word."""

from __future__ import annotations

import ipaddress
import json
import re
from typing import Any

from space_common.hub import is_hub_id

from space_router.foreign_flags.flag import KEYS, Surroundings, Texts, ValueRefused
from space_router.setting import MAX_DRAFT_LENGTH

MAX_ROWS = 65536  # of --max-prefill-rows

_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def whole_number(value: str) -> int:
    """Return a whole number, also as vLLM takes it: 32K is 32,768 and 25.6k is 25,600. Raises ValueRefused."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgtKMGT]?)", value)
    number = float(match[1]) * _SUFFIXES.get(match[2], 1) if match else -1.0
    if number < 0 or number != int(number):
        raise ValueRefused("must be a whole number, such as 4096 or 4k")
    return int(number)


def context_length(value: str, surroundings: Surroundings) -> Texts:
    """Tokens of prompt and output together; -1, 0 and auto leave the checkpoint's own window."""
    return {} if value in ("-1", "0", "auto") else {"max_model_len": str(whole_number(value))}


def prefill_rows(value: str, surroundings: Surroundings) -> Texts:
    """Prompt tokens of one step."""
    return {"max_prefill_rows": str(min(whole_number(value), MAX_ROWS))}


def blocks_for(value: str, surroundings: Surroundings) -> Texts:
    """Tokens of all running sequences, as blocks of keys and values."""
    return {"num_blocks": str(-(-whole_number(value) // surroundings.number("block_size", 16)))}


def concurrent_requests(value: str, surroundings: Surroundings) -> Texts:
    """Requests that run or wait, on all workers together: fewer than may run leave none waiting."""
    total, num_workers = whole_number(value), surroundings.number("workers", 1)
    each = surroundings.number("max_sequences", 0) or (256 if surroundings.num_gpus else 64)
    if total > each * num_workers:
        return {"max_queue": str(total - each * num_workers)}
    each = max(total // num_workers, 1)
    return {"max_sequences": str(each), "max_queue": str(max(total - each * num_workers, 0))}


def slots(value: str, surroundings: Surroundings) -> Texts:
    return {} if value == "-1" else {"max_sequences": value}


def threads(value: str, surroundings: Surroundings) -> Texts:
    return {} if value in ("-1", "0") else {"num_threads": value}


def gpu_fraction(value: str, surroundings: Surroundings) -> Texts:
    """A fraction of the GPU's memory; on a CPU it would be of the whole machine's, and is left out."""
    return {"kv_memory": value} if surroundings.num_gpus else {}


def gib(name: str, value: str) -> Texts:
    """A number of GiB; 0 is none."""
    try:
        number = float(value)
    except ValueError:
        raise ValueRefused("must be a number of GiB") from None
    return {name: str(round(number * 2**30))} if number > 0 else {}


def shards(value: str, surroundings: Surroundings) -> Texts:
    """TGI's --sharded: false is one process; true without --num-shard takes all GPUs."""
    if value.lower() == "false":
        return {"tensor_parallel": "1"}
    return {} if "tensor_parallel" in surroundings.texts else {"tensor_parallel": str(max(surroundings.num_gpus, 1))}


_READ_AS_THEY_ARE = {
    "awq", "awq_marlin", "gptq", "gptq_marlin", "marlin", "compressed-tensors", "gguf", "auto", "none",
}  # fmt: skip
_EIGHT_BITS = {"eetq", "bitsandbytes", "experts_int8", "int8"}
_FOUR_BITS = {"bitsandbytes-nf4", "bitsandbytes-fp4"}


def quantization(value: str, surroundings: Surroundings) -> Texts:
    """A quantised checkpoint is read as it is; the others are made while loading."""
    word = value.lower()
    on_gpu = surroundings.num_gpus > 0
    if word in _READ_AS_THEY_ARE:
        return {"weights": "auto"}
    if word in _EIGHT_BITS:
        return {"weights": "fp8" if on_gpu else "int8"}
    if word in _FOUR_BITS:
        if on_gpu:
            raise ValueRefused(
                "four bits are made while loading on a CPU only: take --weights fp8, or an AWQ or GPTQ model"
            )
        return {"weights": "int4"}
    if word == "fp8":
        if not on_gpu:
            raise ValueRefused("fp8 is for GPUs; on a CPU take --weights int8, or int4")
        return {"weights": "fp8"}
    raise ValueRefused(
        "this format cannot be read: take the model in AWQ, GPTQ, compressed-tensors or GGUF, or unquantised"
    )


def kv_cache(value: str, surroundings: Surroundings) -> Texts:
    word = value.lower()
    if word == "auto":
        return {"kv_dtype": "auto"}
    if word in ("fp8", "fp8_e4m3", "fp8_e4m3fn"):
        if not surroundings.num_gpus:
            raise ValueRefused("keys and values in fp8 are for GPUs: leave it out on a CPU")
        return {"kv_dtype": "fp8"}
    if word in ("f16", "bf16", "f32", "float16", "bfloat16", "float32"):
        raise ValueRefused("keys and values have the number format of --dtype: give it there")
    raise ValueRefused("keys and values are kept as --dtype has them, or on a GPU in fp8 (e4m3): take --kv-dtype fp8")


def eager(value: str, surroundings: Surroundings) -> Texts:
    return {"steps": "eager"} if surroundings.num_gpus else {}


def graphs(value: str, surroundings: Surroundings) -> Texts:
    return eager(value, surroundings) if value.strip() == "0" else {}


def only_one(cure: str) -> Any:
    """Return the translation of a count of which only 1 can be had."""

    def translate(value: str, surroundings: Surroundings) -> Texts:
        if value != "1":
            raise ValueRefused(cure)
        return {}

    return translate


def speculate(value: str, surroundings: Surroundings) -> Texts:
    """TGI's number of n-gram drafts."""
    return {"speculation": "off" if value == "0" else "auto"}


_EAGLE = {"eagle", "eagle3"}
_LOOKUP = {"ngram", "ngram_gpu", "[ngram]", "suffix"}
_ANOTHER_KIND = (
    "this kind of drafter cannot be read: drafts come from --draft-model MODEL (a smaller model, or mtp), --draft-head "
    "HEAD (of EAGLE), the text itself (--lookup), or masks that `spaceserve train` adds"
)


def speculative_config(value: str, surroundings: Surroundings) -> Texts:
    """vLLM's JSON: a method, a model, and how many drafts, which here are as many as pay."""
    try:
        found = json.loads(value)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueRefused('must be a JSON object, such as {"method": "ngram", "num_speculative_tokens": 5}')
    method, model = found.get("method"), found.get("model")
    if method in _LOOKUP or model in _LOOKUP:
        return {"lookup": "on"}
    if method is not None and (method == "mtp" or str(method).endswith("_mtp")):
        return {"draft_model": "mtp"}
    if isinstance(model, str) and (method in _EAGLE or (method is None and _is_eagle(model))):
        return {"draft_head": model}
    if method not in (None, "draft_model") or not isinstance(model, str) or _is_head(model):
        raise ValueRefused(_ANOTHER_KIND)
    return {"draft_model": model}


def speculative_model(value: str, surroundings: Surroundings) -> Texts:
    if value in _LOOKUP:
        return {"lookup": "on"}
    if _is_eagle(value):
        return {"draft_head": value}
    if _is_head(value):
        raise ValueRefused(_ANOTHER_KIND)
    return {"draft_model": value}


def num_drafts(value: str, surroundings: Surroundings) -> Texts:
    if whole_number(value) > MAX_DRAFT_LENGTH:
        raise ValueRefused(
            f"at most {MAX_DRAFT_LENGTH} drafts are made in a step; how many pay is measured: leave it out"
        )
    return {"speculation": "off"} if value == "0" else {}


def _is_eagle(model: str) -> bool:
    return re.search(r"eagle", model.lower()) is not None


def _is_head(model: str) -> bool:
    return re.search(r"medusa|accelerator|speculator|hydra|dflash", model.lower()) is not None


def tokenizer(value: str, surroundings: Surroundings) -> Texts:
    model = surroundings.texts.get("model", "")
    if value == model or ".gguf" in model.lower() or re.search(r"gguf[^/]*$", model.lower()):
        return {}
    raise ValueRefused("the tokenizer is the checkpoint's own: put the other's files into the model's folder")


def lora_modules(value: str, surroundings: Surroundings) -> Texts:
    """vLLM's NAME=PATH or {"name": ..., "path": ...}, one or more."""
    found = []
    for word in value.splitlines():
        if not word.lstrip().startswith("{"):
            found.append(word)
            continue
        try:
            module = json.loads(word)
            found.append(f"{module['name']}={module['path']}")
        except (ValueError, KeyError):
            raise ValueRefused('must be NAME=PATH, or {"name": NAME, "path": PATH}') from None
    return {"lora": ",".join(found)}


def lora_adapters(value: str, surroundings: Surroundings) -> Texts:
    """TGI's list of FOLDER or NAME=FOLDER."""
    return {"lora": ",".join(word if "=" in word else f"{word}={word}" for word in value.split(",") if word.strip())}


def names(value: str, surroundings: Surroundings) -> Texts:
    return {"served_model_name": ",".join(value.splitlines())}


def keys(value: str, surroundings: Surroundings) -> Texts:
    return {KEYS: ",".join(value.splitlines())}


def origins(value: str, surroundings: Surroundings) -> Texts:
    """vLLM's JSON list of origins; TGI's and llama.cpp's are separated by commas."""
    if not value.lstrip().startswith("["):
        return {"cors_origins": value}
    try:
        return {"cors_origins": ",".join(map(str, json.loads(value)))}
    except ValueError:
        raise ValueRefused('must be a JSON list, such as ["*"]') from None


def host(value: str, surroundings: Surroundings) -> Texts:
    """llama-server's path of a socket ends in .sock."""
    return {"host": f"unix:{value}" if value.endswith(".sock") and not value.startswith("unix:") else value}


def hostname(value: str, surroundings: Surroundings) -> Texts:
    """A name that is no address is left out, as TGI does: containers have their own name in HOSTNAME."""
    try:
        ipaddress.ip_address(value)
    except ValueError:
        return {"host": value} if value == "localhost" else {}
    return {"host": value}


def socket_path(value: str, surroundings: Surroundings) -> Texts:
    return {"host": f"unix:{value}"}


_LEVELS = {"critical": "error", "trace": "debug"}


def log_level(value: str, surroundings: Surroundings) -> Texts:
    return {"log_level": _LEVELS.get(value.lower(), value.lower())}


def verbosity(value: str, surroundings: Surroundings) -> Texts:
    """llama-server's number: 0 generic, 1 error, 2 warning, 3 info, more is debug."""
    number = whole_number(value)
    return {"log_level": ("error", "error", "warning", "info")[number] if number < 4 else "debug"}


def on_off(value: str, surroundings: Surroundings) -> Texts:
    return {"offline": "off" if value.lower() in ("off", "0", "false") else "on"}


def gpu_layers(value: str, surroundings: Surroundings) -> Texts:
    """0 layers on the GPU is the CPU; any other number is the whole model on one device."""
    return {"device": "cpu"} if value == "0" else {}


def hub_file(value: str, surroundings: Surroundings) -> Texts:
    """OWNER/NAME with a file behind a colon; a quantisation behind it names no file."""
    repository, colon, behind = value.partition(":")
    if colon and is_hub_id(repository) and not behind.lower().endswith(".gguf"):
        raise ValueRefused(f"name the file instead of {behind}: --model OWNER/NAME:FILE.gguf")
    return {"model": value}


def attention(value: str, surroundings: Surroundings) -> Texts:
    words = {"flash_attn": "flash-attn", "triton_attn": "triton", "flashinfer": "flashinfer", "torch_sdpa": "torch"}
    if value.lower() not in words:
        raise ValueRefused("the backends here are those of --attention; auto takes the fastest: leave it out")
    return {"attention": words[value.lower()]}


def template(value: str, surroundings: Surroundings) -> Texts:
    """A name or a file; vLLM and llama-server take the template itself, too."""
    if "{%" in value or "{{" in value:
        raise ValueRefused("write the template into a file and give its path")
    return {"chat_template": value}
