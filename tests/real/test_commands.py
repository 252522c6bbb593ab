"""Every command with a real model: serve and a real client, doctor, convert, train, an adapter beside the model."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from space_common.process import ServerProcess
from space_model.loading.load import load_model

QUESTION = [{"role": "user", "content": "What is the capital of Japan?"}]


def spaceserve(*arguments: str, code: int = 0) -> str:
    run = subprocess.run(
        [sys.executable, "-P", "-m", "space_router", *arguments], check=False, capture_output=True, text=True
    )
    assert run.returncode == code, run.stdout + run.stderr
    return run.stdout


@pytest.fixture(scope="module")
def server(smollm2_folder: Path) -> Iterator[ServerProcess]:
    flags = ["--model", str(smollm2_folder), "--adapter", f"again={smollm2_folder}", "--speculation", "5"]
    with ServerProcess(flags) as running:
        yield running


def test_a_question_is_answered_through_the_openai_client(server: ServerProcess) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    names = [model.id for model in client.models.list()]
    texts = []
    for name in names:
        stream = client.chat.completions.create(
            model=name, messages=QUESTION, max_tokens=24, temperature=0, stream=True
        )
        texts.append("".join(event.choices[0].delta.content or "" for event in stream if event.choices))
    assert len(names) == 2
    assert "Tokyo" in texts[0]  # by a wide margin: in bfloat16 kinds of processors differ where two answers are near
    assert texts[1] == texts[0]  # an adapter drafts; it writes nothing


def test_drafts_asked_for_change_nothing_and_are_accepted(server: ServerProcess) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    (name, *_) = [model.id for model in client.models.list()]
    answers = {
        speculation: client.chat.completions.create(
            model=name, messages=QUESTION, max_tokens=48, temperature=0, extra_body={"speculation": speculation}
        )
        for speculation in ("off", 5)
    }
    off, five = (answer.choices[0].message.content for answer in answers.values())
    assert five == off
    assert answers[5].model_extra is not None
    assert answers[5].model_extra["spaceserve"]["tokens_per_step"] > 1.3


def test_doctor_says_that_it_would_start(smollm2_file: Path) -> None:
    report = json.loads(spaceserve("doctor", "--model", str(smollm2_file), "--port", "0", "--json"))
    assert report["would_start"], report


@pytest.mark.slow
def test_convert_makes_a_folder_with_the_same_weights(smollm2_file: Path, tmp_path: Path) -> None:
    spaceserve("convert", str(smollm2_file), str(tmp_path / "new"))
    ours, converted = load_model(smollm2_file, dtype="float32"), load_model(tmp_path / "new", dtype="float32")
    assert converted.facts.eos_ids == ours.facts.eos_ids
    assert converted.facts.vocab_size == ours.facts.vocab_size


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_updates_of_training_leave_a_checkpoint_that_loads(smollm2_file: Path, tmp_path: Path) -> None:
    data = tmp_path / "chats.jsonl"
    words = "The river runs to the sea, past the mill and the bridge, and nothing holds it back. " * 12
    lines = [{"messages": [*QUESTION, {"role": "assistant", "content": f"{n}: {words}"}]} for n in range(40)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    run = tmp_path / "run"
    sizes = ["--num-masks", "2", "--lora-rank", "4", "--head-hidden", "64", "--length", "128", "--rows-per-step", "2"]
    spaceserve("train", "--model", str(smollm2_file), "--data", str(data), "--out", str(run), "--steps", "2", *sizes)
    assert load_model(run / "model").facts.num_masks == 2
