"""Other engines' flags become ours, one line each; what cannot be had is refused with its cure."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from space_router import cli
from space_router.api_keys import plain_keys
from space_router.commands import healthcheck
from space_router.config import ServeConfig, build, settings
from space_router.errors import ConfigError
from space_router.foreign_flags import markdown, table
from space_router.foreign_flags.command_line import Translated, translate
from space_router.foreign_flags.flag import SWITCH_WORDS, ForeignFlag, OtherEngine, Surroundings, Value

ROOT = Path(__file__).parents[2]
CPU = {"CUDA_VISIBLE_DEVICES": ""}


def translated(line: str, **environment: str) -> Translated:
    return translate(line.split(), CPU | environment, [*settings()], ("--help", "-h"))


def served(words: list[str], monkeypatch: pytest.MonkeyPatch) -> ServeConfig:
    """The configuration that a command line starts the server with."""
    found: list[ServeConfig] = []

    def take(config: ServeConfig) -> int:
        found.append(config)
        return 0

    monkeypatch.setattr(cli, "_serve", take)
    assert cli.main(["serve", *words]) == 0
    return found[0]


def refused(line: str, **environment: str) -> str:
    with pytest.raises(ConfigError) as caught:
        translated(line, **environment)
    return str(caught.value)


TAKEN: dict[str, tuple[str, dict[str, Any]]] = {
    "--port": ("9000", {"port": 9000}),
    "--api-key": ("sk-a sk-b", {"api_keys": plain_keys("sk-a", "sk-b")}),
    "--revision": ("refs/pr/2", {"revision": "refs/pr/2"}),
    "--dtype": ("half", {"dtype": "float16"}),
    "--kv-cache-dtype": ("auto", {"kv_dtype": "auto"}),
    "--model": ("./m", {"model": "./m"}),
    "--host": ("/run/s.sock", {"host": "unix:/run/s.sock"}),
    "--chat-template": ("vicuna", {"chat_template": "vicuna"}),
    "--model-id": ("a/b", {"model": "a/b"}),
    "--num-shard": ("2", {"tensor_parallel": 2}),
    "--sharded": ("false", {"tensor_parallel": 1}),
    "--quantize": ("bitsandbytes-nf4", {"weights": "int4"}),
    "--speculate": ("0", {"speculation": "off"}),
    "--max-input-tokens": ("1024", {"max_prompt_tokens": 1024}),
    "--max-total-tokens": ("2048", {"max_model_len": 2048}),
    "--max-batch-prefill-tokens": ("100000", {"max_prefill_rows": 65536}),
    "--max-batch-total-tokens": ("1001", {"num_blocks": 63}),
    "--max-batch-size": ("8", {"max_sequences": 8}),
    "--max-concurrent-requests": ("128", {"max_queue": 64}),
    "--max-best-of": ("2", {"max_choices": 2}),
    "--max-stop-sequences": ("6", {"max_stop_strings": 6}),
    "--payload-limit": ("2000000", {"max_body": 2_000_000}),
    "--hostname": ("0.0.0.0", {"host": "0.0.0.0"}),
    "--huggingface-hub-cache": ("/data", {"download_folder": "/data"}),
    "--cuda-memory-fraction": ("0.8", {"kv_memory": "auto"}),
    "--cuda-graphs": ("1,2,4", {"steps": "auto"}),
    "--json-output": ("", {"log_format": "json"}),
    "--cors-allow-origin": ("https://a.b", {"cors_origins": ("https://a.b",)}),
    "--lora-adapters": ("a,b=c", {"lora": (("a", "a"), ("b", "c"))}),
    "-p": ("80", {"port": 80}),
    "MODEL": ("a/b", {"model": "a/b"}),
    "--served-model-name": ("one two", {"served_model_name": ("one", "two")}),
    "--download-dir": ("/cache", {"download_folder": "/cache"}),
    "--max-model-len": ("32K", {"max_model_len": 32768}),
    "--quantization": ("awq_marlin", {"weights": "auto"}),
    "--tensor-parallel-size": ("2", {"tensor_parallel": 2}),
    "--data-parallel-size": ("2", {"workers": 2}),
    "--gpu-memory-utilization": ("0.9", {"kv_memory": "auto"}),
    "--kv-cache-memory-bytes": ("1G", {"kv_memory": str(2**30)}),
    "--kv-offloading-size": ("0.5", {"kv_offload": 2**29}),
    "--block-size": ("32", {"block_size": 32}),
    "--num-gpu-blocks-override": ("100", {"num_blocks": 100}),
    "--max-num-seqs": ("256", {"max_sequences": 256}),
    "--max-num-batched-tokens": ("8192", {"max_prefill_rows": 8192}),
    "--enforce-eager": ("", {"steps": "auto"}),
    "--attention-backend": ("TORCH_SDPA", {"attention": "torch"}),
    "--speculative-config": ('{"model":"tiny/drafter","num_speculative_tokens":5}', {"draft_model": "tiny/drafter"}),
    "--speculative-model": ("[ngram]", {"lookup": "on"}),
    "--num-speculative-tokens": ("0", {"speculation": "off"}),
    "--lora-modules": ('sql=/a {"name":"x","path":"/b"}', {"lora": (("sql", "/a"), ("x", "/b"))}),
    "--tool-call-parser": ("llama4_json", {"tool_call_parser": "llama3_json"}),
    "--reasoning-parser": ("gpt_oss", {"reasoning_parser": "openai_gptoss"}),
    "--generation-config": ("vllm", {"generation_config": "off"}),
    "--uds": ("/tmp/v.sock", {"host": "unix:/tmp/v.sock"}),
    "--allowed-origins": ('["https://a","https://b"]', {"cors_origins": ("https://a", "https://b")}),
    "--ssl-keyfile": ("", {}),
    "--ssl-certfile": ("", {}),
    "--uvicorn-log-level": ("critical", {"log_level": "error"}),
    "-hf": ("a/b:c.gguf", {"model": "a/b:c.gguf"}),
    "-a": ("mine", {"served_model_name": ("mine",)}),
    "-c": ("8192", {"max_model_len": 8192}),
    "-np": ("4", {"max_sequences": 4}),
    "-t": ("8", {"num_threads": 8}),
    "-ngl": ("0", {"device": "cpu"}),
    "-ub": ("1024", {"max_prefill_rows": 1024}),
    "-ctk": ("auto", {"kv_dtype": "auto"}),
    "-ctv": ("auto", {"kv_dtype": "auto"}),
    "--chat-template-file": ("chatml", {"chat_template": "chatml"}),
    "--reasoning-format": ("none", {"reasoning_parser": "off"}),
    "-md": ("d.gguf", {"draft_model": "d.gguf"}),
    "--offline": ("", {"offline": "on"}),
    "--ssl-key-file": ("", {}),
    "--ssl-cert-file": ("", {}),
    "-v": ("", {"log_level": "debug"}),
    "-lv": ("2", {"log_level": "warning"}),
    "--log-disable": ("", {"log_level": "error"}),
    "--chat-template-kwargs": ('{"a":1}', {"default_chat_template_kwargs": '{"a": 1}'}),
}
"""A value of each flag that becomes a setting, and what the configuration then has. Files are tried elsewhere."""

WITH_SETTINGS = [row for row in table.TABLE if row.ours]


def test_every_row_that_sets_something_is_tried() -> None:
    assert {row.names[0] for row in WITH_SETTINGS} - TAKEN.keys() == set()
    assert TAKEN.keys() - table.BY_NAME.keys() == set()


def test_names_are_unique_and_settings_are_there() -> None:
    names = [name for row in table.TABLE for name in row.names]
    assert len(names) == len(set(names)) == len(table.BY_NAME)
    assert {name for row in table.TABLE for name in row.ours} <= {*settings(), "api_keys"}
    variables = [each for row in table.TABLE for each in row.variables]
    assert len(variables) == len(set(variables))
    assert len(table.of(OtherEngine.TGI)) > 50


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, (value, expected) in TAKEN.items() if expected])
def test_a_flag_becomes_ours(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    words = value.split() if name == table.MODEL else [name, *value.split()]
    config = served(words, monkeypatch)
    expected = TAKEN[name][1]
    assert {field: getattr(config, field) for field in expected} == expected
    default = served([], monkeypatch)
    changed = {field for field in vars(default) if getattr(config, field) != getattr(default, field)}
    assert changed <= {*expected, "model_is_named", "notices", "key_source"}
    assert "sk-a" not in str(config.notices)


@pytest.mark.parametrize(
    ("line", "sequences", "queue"),
    [
        ("--max-concurrent-requests 32", 32, 0),
        ("--max-concurrent-requests 64", 64, 0),
        ("--max-concurrent-requests 33 --workers 2", 16, 1),
        ("--max-concurrent-requests 100 --workers 2", 50, 0),
        ("--max-concurrent-requests 128 --max-batch-size 8", 8, 120),
        ("--max-concurrent-requests 0", 1, 0),
        ("--max-batch-size 1 --max-concurrent-requests 32", 1, 31),
        ("--max-concurrent-requests 32 --max-batch-size 1", 1, 31),
        ("--max-concurrent-requests 32 --max-batch-size 4 --workers 2", 4, 24),
    ],
)
def test_as_many_requests_run_or_wait_as_tgi_would_take(
    line: str, sequences: int, queue: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    config = served(line.split(), monkeypatch)
    assert (config.max_sequences, config.max_queue) == (sequences, queue)


def sample(row: ForeignFlag) -> list[str]:
    """Words after a flag that ask for as little as it can."""
    if row.value is Value.NONE:
        return []
    if row.names[0] == "--tokenizer":
        return ["a/b", "--model", "a/b"]
    for word in ("auto", "{}", "0", "-1", "1", "mp", "fcfs", "assistant"):
        try:
            row.translate(word, Surroundings(environment=CPU))
        except ValueError:
            continue
        return [word]
    return ["x"]


@pytest.mark.parametrize("name", [row.names[-1] for row in table.TABLE if not row.ours and not row.is_refused])
def test_a_flag_with_nothing_to_do_is_said_and_changes_nothing(name: str) -> None:
    row = table.BY_NAME[name]
    found = translate([name, *sample(row)], CPU, [*settings()])
    assert found.arguments in ([], ["--model", "a/b"])
    (line,) = found.notices
    assert line.startswith(name)
    assert "nothing to do here" in line


@pytest.mark.parametrize("name", [name for row in table.TABLE if row.is_refused for name in row.names])
def test_a_flag_that_cannot_be_had_is_refused_with_reason_and_cure(name: str) -> None:
    row = table.BY_NAME[name]
    message = refused(" ".join([name, *sample(row)]))
    assert message.startswith(name)
    reason, period, cure = row.how.removeprefix("refused: ").partition(". ")
    assert period
    assert reason in message
    assert cure.rstrip(".") in message


TGI_LINES = [
    # docs/source/basic_tutorials/using_cli.md, README.md, docs/source/conceptual/quantization.md, speculation.md,
    # Makefile, docs/source/quicktour.md (behind the image's name), clients/python/README.md
    "--model-id MODEL_HUB_ID --port 8080",
    "--model-id mistralai/Mistral-7B-Instruct-v0.2",
    "--model-id tiiuae/falcon-7b-instruct --port 8080",
    "--model-id tiiuae/falcon-7b-instruct --quantize bitsandbytes --port 8080",
    "--model-id HuggingFaceH4/zephyr-7b-beta --quantize bitsandbytes-nf4",
    "--model-id HuggingFaceH4/zephyr-7b-beta --quantize gptq",
    "--model-id /data/falcon-40b-gptq/ --sharded true --num-shard 2 --quantize gptq",
    "--model-id tiiuae/falcon-7b-instruct --disable-custom-kernels",
    "--model-id google/gemma-2b-it --speculate 2",
    "--json-output",
    "--model-id NousResearch/Hermes-2-Pro-Llama-3-8B --num-shard 1 --max-input-length 4000 --max-total-tokens 4096",
]

VLLM_LINES = [
    # docs/cli/README.md, docs/features/{tool_calling,reasoning_outputs,lora,spec_decode}.md, quantization/gguf.md
    "meta-llama/Llama-2-7b-hf",
    "meta-llama/Llama-2-7b-hf --port 8100",
    "meta-llama/Llama-2-7b-hf --uds /tmp/vllm.sock",
    "meta-llama/Llama-3.1-8B-Instruct --enable-auto-tool-choice --tool-call-parser llama3_json "
    "--chat-template examples/tool_chat_template_llama3.1_json.jinja",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B --reasoning-parser deepseek_r1",
    "meta-llama/Llama-2-7b-hf --enable-lora --lora-modules sql-lora=/cache/models--yard1--llama-2-7b-sql-lora-test/0",
    "--host 0.0.0.0 --port 8000 --model facebook/opt-6.7b --seed 42 -tp 1 --gpu_memory_utilization 0.8 "
    '--speculative_config {"model":"facebook/opt-125m","num_speculative_tokens":5}',
    "./Qwen3-0.6B-Q4_K_M.gguf --tokenizer Qwen/Qwen3-0.6B --dtype float16",
    "./Qwen3-0.6B-Q4_K_M.gguf --tokenizer Qwen/Qwen3-0.6B --dtype float16 --tensor-parallel-size 2",
    "NousResearch/Meta-Llama-3-8B-Instruct --dtype auto --api-key token-abc123",
    "meta-llama/Llama-3.1-8B-Instruct --max-num-batched-tokens 8192 --max-num-seqs 64 --enable-prefix-caching "
    "--enforce-eager --swap-space 4 --disable-log-requests --max-model-len 32k",
    "Qwen/Qwen3-8B --speculative-config.method ngram --speculative-config.num_speculative_tokens 5",
    'Qwen/Qwen3-8B --reasoning-parser qwen3 --default-chat-template-kwargs {"enable_thinking":false}',
]

LLAMA_LINES = [
    # tools/server/README.md, docs/speculative.md and docs/function-calling.md
    "-m models/7B/ggml-model.gguf -c 2048",
    "-m model.gguf --host 0.0.0.0 --port 8080 -np 2 -t 8 -ngl 99 -fa --jinja --api-key k",
    "-m model.gguf -fa on -ub 1024 -b 1024 --cache-reuse 256 --ctx-size 0 --metrics --no-webui",
    "-m model.gguf -md draft.gguf --draft-max 16 --draft-min 1 -a mine",
]


@pytest.mark.parametrize("line", [*TGI_LINES, *VLLM_LINES, *LLAMA_LINES])
def test_documented_command_lines_start_this_server(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert served(line.split(), monkeypatch).model


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("unsloth/Qwen3-0.6B-GGUF:Q4_K_M --tokenizer Qwen/Qwen3-0.6B", "name the file instead of Q4_K_M"),
        ("m --trust-remote-code", "code from a model's repository is never run"),
        ("m --tokenizer other/model", "the tokenizer is the checkpoint's own"),
        ("m --kv-cache-dtype fp8", "keys and values in fp8 are for GPUs"),
        ("m --kv-cache-dtype fp8_e5m2", "--kv-dtype fp8"),
        ("m --quantization fp8", "on a CPU take --weights int8"),
        ("m --quantize exl2", "AWQ, GPTQ, compressed-tensors or GGUF"),
        ("m -pp 2", "Give --tensor-parallel N"),
        ("m --load-format dummy", "only auto, hf, safetensors"),
        ('m --speculative-config {"method":"medusa","model":"a/b"}', "cannot be read: drafts come from --draft-model"),
        ("m --speculative-config ngram", "must be a JSON object"),
        ("m --max-model-len some", "must be a whole number"),
        ("m --chat-template {{x}}", "write the template into a file"),
        ("m --lora-modules {}", "must be NAME=PATH"),
        ("m --max-num-seqs", "--max-num-seqs needs a value"),
        ("m --max-num-seqs --port 1", "--max-num-seqs needs a value"),
    ],
)
def test_values_that_cannot_be_had_are_refused_with_the_cure(line: str, words: str) -> None:
    assert words in refused(line)


@pytest.mark.parametrize(
    ("line", "head"),
    [
        ('--speculative-config {"method":"eagle3","model":"a/b"}', "a/b"),
        ('--speculative-config {"model":"a/b.eagle3","num_speculative_tokens":3}', "a/b.eagle3"),
        ("--speculative-model yuhuili/EAGLE-LLaMA3-Instruct-8B", "yuhuili/EAGLE-LLaMA3-Instruct-8B"),
        ("-md a/b-eagle", "a/b-eagle"),
    ],
)
def test_heads_of_eagle_are_draft_heads(line: str, head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    config = served(["m", *line.split()], monkeypatch)
    assert (config.draft_head, config.draft_model) == (head, None)


def test_two_flags_that_disagree_are_both_named() -> None:
    assert refused("--max-num-seqs 8 --max-sequences 16") == (
        "--max-sequences 16 and --max-num-seqs 8 (vLLM) both set --max-sequences, to different values: give one."
    )
    assert "--max-num-seqs 8 (vLLM) and -np 4 (llama.cpp)" in refused("--max-num-seqs 8 -np 4")
    assert "a/b (vLLM) and --model c/d (vLLM and llama.cpp)" in refused("a/b --model c/d")
    assert translated("--max-num-seqs 16 --max-sequences 16").arguments == ["--max-sequences", "16"]
    assert translated("--payload-limit 4194304 --max-body 4MiB").arguments == ["--max-body", "4MiB"]
    assert build({"port": "2"}, {}).port == 2
    assert translated("--port 1 --port 2").arguments == ["--port", "1", "--port", "2"]  # the last counts, as ever
    conflict = refused("--api-key one", SPACESERVE_API_KEYS="two")
    assert "SPACESERVE_API_KEYS" in conflict
    assert "--api-key" in conflict
    assert "one " not in conflict.replace("one.", "")


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--max-num-seq", "is --max-num-seqs (vLLM) meant?"),
        ("--prot", "is --port meant?"),
        ("--max-total-token", "is --max-total-tokens (TGI) meant?"),
        ("--ctx-sise", "is --ctx-size (llama.cpp) meant?"),
        ("--max-sequence", "is --max-sequences meant?"),
        ("--quux-frobnicate", "--quux-frobnicate is no flag; `spaceserve serve --help` has all"),
    ],
)
def test_an_unknown_flag_is_named_with_the_nearest(flag: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", flag, "1"]) == 2
    assert words in capsys.readouterr().err


def test_each_foreign_flag_has_one_line_that_names_ours(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    line = "demo --max-num-seqs 8 --dtype half --swap-space 4 --api-key sk-secret --port 0 --seed 0"
    config = served(line.split(), monkeypatch)
    assert config.notices == (
        "--max-num-seqs 8 (vLLM) is --max-sequences 8 here",
        "--dtype half (TGI and vLLM) is --dtype float16 here",
        "--swap-space 4 (vLLM): nothing to do here (what a preempted request had is computed again, or kept by "
        "--kv-offload)",
        "--api-key (TGI and vLLM and llama.cpp) is SPACESERVE_API_KEYS here; every user of this machine can read it on "
        "a command line: put it into the variable or --api-key-file",
        "--seed 0 (vLLM and llama.cpp): nothing to do here (a request without seed has one of its own, and the answer "
        "says which)",
    )
    monkeypatch.undo()
    monkeypatch.setattr("space_router.serve.ModelText.load", lambda config: (_ for _ in ()).throw(ConfigError("ends")))
    from space_router.serve import run

    with caplog.at_level(logging.INFO), pytest.raises(ConfigError, match="ends"):
        run(config)
    assert [record.getMessage() for record in caplog.records if "(vLLM)" in record.getMessage()] == [
        config.notices[0],
        config.notices[2],
    ]


def test_a_key_on_the_command_line_is_taken_and_warned_of_and_one_in_a_variable_is_not() -> None:
    (line,) = translated("--api-key sk-secret").notices
    assert "every user of this machine can read it on a command line" in line
    found = translated("--drop-in vllm", VLLM_API_KEY="sk-secret")
    assert found.environment["SPACESERVE_API_KEYS"] == "sk-secret"
    assert "can read it" not in str(found.notices)
    assert "sk-secret" not in str([line, *found.notices])


def test_a_routers_command_names_where_a_workers_flag_goes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["router", "--worker-address", "w:1", "--max-num-seqs", "8"]) == 2
    assert "--max-num-seqs 8 (vLLM) is --max-sequences of a worker" in capsys.readouterr().err


def test_variables_of_another_engine_are_read_where_asked_for() -> None:
    image = {
        "MODEL_ID": "org/llama", "NUM_SHARD": "2", "MAX_TOTAL_TOKENS": "4096", "MAX_INPUT_LENGTH": "4000", "PORT": "80",
        "HOSTNAME": "4f2a9c01d2be", "JSON_OUTPUT": "true", "TRUST_REMOTE_CODE": "false", "API_KEY": "sk-secret",
        "HUGGINGFACE_HUB_CACHE": "/data",
    }  # fmt: skip
    found = translated("--drop-in tgi", **image)
    config = build({"drop_in": "tgi"}, found.environment)
    assert (config.model, config.tensor_parallel, config.max_model_len) == ("org/llama", 2, 4096)
    assert (config.max_prompt_tokens, config.port, config.host) == (4000, 80, "0.0.0.0")
    assert (config.log_format, config.download_folder, len(config.api_keys)) == ("json", "/data", 1)
    assert "MODEL_ID=org/llama (TGI) is --model org/llama here" in found.notices
    assert "sk-secret" not in str(found.notices)
    (line,) = translated("", **image).notices
    assert line == "MODEL_ID is set, and nothing reads it: --drop-in tgi reads TGI's variables"
    assert "SPACESERVE_MODEL" not in translated("", **image).environment
    with pytest.raises(ConfigError, match=r"TRUST_REMOTE_CODE=.*never run"):
        translated("--drop-in tgi", TRUST_REMOTE_CODE="true")
    flag_wins = translated("--drop-in tgi --model-id other/model", **image)
    assert flag_wins.arguments == ["--drop-in", "tgi", "--model", "other/model"]
    assert "SPACESERVE_MODEL" not in flag_wins.environment
    assert "SPACESERVE_MODEL=mine and MODEL_ID=org/llama (TGI) both set --model" in refused(
        "--drop-in tgi", SPACESERVE_MODEL="mine", **image
    )


def test_variables_of_another_engine_are_read_beside_each_other() -> None:
    image = {"MAX_CONCURRENT_REQUESTS": "100", "MAX_BATCH_SIZE": "8", "CUDA_VISIBLE_DEVICES": ""}
    for line, environment, expected in (
        ("--drop-in tgi", image, (8, 92)),
        ("--drop-in tgi", image | {"MAX_CONCURRENT_REQUESTS": "32"}, (8, 24)),
        ("--drop-in tgi --max-batch-size 4", image, (4, 96)),
        ("--drop-in tgi --workers 2", image, (8, 84)),
        ("--drop-in tgi", {"SPACESERVE_MAX_SEQUENCES": "16", "MAX_CONCURRENT_REQUESTS": "100"}, (16, 84)),
    ):
        found = translated(line, **environment)
        given = dict(zip(found.arguments[::2], found.arguments[1::2], strict=True))
        sequences = given.get("--max-sequences", found.environment.get("SPACESERVE_MAX_SEQUENCES"))
        assert (int(sequences or 0), int(found.environment["SPACESERVE_MAX_QUEUE"])) == expected


def test_a_drop_in_listens_where_the_other_engine_does() -> None:
    for engine, place in (("tgi", ("0.0.0.0", 3000)), ("vllm", ("0.0.0.0", 8000)), ("llama.cpp", ("127.0.0.1", 8080))):
        config = build({}, {"SPACESERVE_DROP_IN": engine})
        assert (config.host, config.port) == place
    assert build({"drop_in": "vllm", "port": "1"}, {}).port == 1
    llama = translated("", SPACESERVE_DROP_IN="llama.cpp", LLAMA_ARG_CTX_SIZE="4096", LLAMA_ARG_N_PARALLEL="2")
    config = build({}, llama.environment)
    assert (config.max_model_len, config.max_sequences) == (4096, 2)
    assert build({}, translated("--drop-in vllm", VLLM_API_KEY="k").environment).api_keys == plain_keys("k")


def test_switch_words_follow_only_flags_that_take_them() -> None:
    assert translated("-fa on -m a.gguf").arguments == ["--model", "a.gguf"]
    assert translated("-fa a.gguf").arguments == ["--model", "a.gguf"]
    assert "on" in SWITCH_WORDS


def test_the_health_check_asks_where_foreign_flags_have_it_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    class Connection:
        def __init__(self, host: str, port: int, **_: Any) -> None:
            asked.append((host, port))

        def request(self, *_: str) -> None:
            raise OSError("refused")

        def close(self) -> None: ...

    monkeypatch.setattr("http.client.HTTPConnection", Connection)
    healthcheck.main(["serve", "--model-id", "a/b", "-p", "81"], CPU)
    healthcheck.main(["serve"], CPU | {"SPACESERVE_DROP_IN": "tgi", "PORT": "80"})
    healthcheck.main(["serve"], CPU | {"SPACESERVE_DROP_IN": "vllm"})
    assert asked == [("127.0.0.1", 81), ("127.0.0.1", 80), ("127.0.0.1", 8000)]


def test_the_page_has_the_table() -> None:
    """`python -m space_router.foreign_flags.markdown` writes what is between the marks."""
    text = (ROOT / "router/guides/coming_from.md").read_text(encoding="utf-8")
    assert text.partition(markdown.BEGIN)[2].partition(markdown.END)[0].strip() == markdown.to_markdown().strip()
