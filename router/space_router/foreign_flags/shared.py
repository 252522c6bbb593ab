"""Flags that several engines have under the same name."""

from __future__ import annotations

from space_router.foreign_flags import values
from space_router.foreign_flags.flag import ForeignFlag, OtherEngine, Rows, Value

_all = Rows((OtherEngine.TGI, OtherEngine.VLLM, OtherEngine.LLAMA_CPP))
_tgi_vllm = Rows((OtherEngine.TGI, OtherEngine.VLLM))
_vllm_llama = Rows((OtherEngine.VLLM, OtherEngine.LLAMA_CPP))
_tgi_llama = Rows((OtherEngine.TGI, OtherEngine.LLAMA_CPP))

FLAGS: tuple[ForeignFlag, ...] = (
    _all.same("--port", "port", variable="PORT LLAMA_ARG_PORT"),
    _all.row(
        "--api-key",
        "SPACESERVE_API_KEYS, one key or several; a variable hides it from other processes, a flag does not",
        values.keys,
        "api_keys",
        variable="API_KEY VLLM_API_KEY LLAMA_API_KEY",
        value=Value.MANY,
    ),
    _tgi_vllm.same("--revision", "revision", variable="REVISION"),
    _tgi_vllm.words(
        "--dtype",
        "dtype",
        {"half": "float16", "float": "float32"},
        variable="DTYPE",
        how="`half` is `float16`, `float` is `float32`; others as they are",
    ),
    _tgi_vllm.row(
        "--kv-cache-dtype",
        "`fp8`, `fp8_e4m3`, `fp8_e4m3fn`: `fp8`, on a GPU; `auto`; others are refused",
        values.kv_cache,
        "kv_dtype",
        variable="KV_CACHE_DTYPE",
    ),
    _tgi_vllm.refused(
        "--trust-remote-code",
        "code from a model's repository is never run. Leave it out where server/MODELS.md has the model's family; "
        "other models cannot be served",
        value=Value.NONE,
        variable="TRUST_REMOTE_CODE",
    ),
    _tgi_llama.refused(
        "--rope-scaling",
        "positions are scaled as the checkpoint says. Set rope_scaling in its config.json",
        variable="ROPE_SCALING LLAMA_ARG_ROPE_SCALING_TYPE",
    ),
    _vllm_llama.row(
        "--model -m", "a hub id, a folder or a GGUF file", values.hub_file, "model", variable="LLAMA_ARG_MODEL"
    ),
    _vllm_llama.row(
        "--host",
        "an address; a path that ends in .sock is a Unix socket",
        values.host,
        "host",
        variable="LLAMA_ARG_HOST",
    ),
    _vllm_llama.row(
        "--chat-template",
        "a file, or one of our names; a template itself is refused: write it into a file",
        values.template,
        "chat_template",
        variable="LLAMA_ARG_CHAT_TEMPLATE",
    ),
    _vllm_llama.same(
        "--chat-template-kwargs --default-chat-template-kwargs",
        "default_chat_template_kwargs",
        variable="LLAMA_ARG_CHAT_TEMPLATE_KWARGS",
    ),
    _vllm_llama.nothing("--seed -s", "a request without `seed` has one of its own, and the answer says which"),
)
