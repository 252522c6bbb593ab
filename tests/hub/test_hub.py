"""A model of the hub is fetched once, goes on where it was, and if it cannot be had one line says why."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from space_common.process import ServerProcess
from tiny_checkpoints import tiny_checkpoint

COMMIT = "c0ffee" * 6 + "c0ff"
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"a": 1}',
    "model.safetensors": bytes(range(256)) * 4096,
    "consolidated.safetensors": b"the same weights once more",
    "pytorch_model.bin": b"what may run code",
}
WANTED = {"config.json", "tokenizer.json", "model.safetensors"}
SECRET = "hf_a_secret"


@pytest.fixture(autouse=True)
def model(hub: Any, repository: Any) -> Any:
    hub.models["house/model"] = repository(FILES)
    return hub.models["house/model"]


def test_the_files_of_a_model_are_fetched_and_none_that_nobody_reads(fetch: Any) -> None:
    made = fetch("house/model")
    assert {file.name for file in made.folder.iterdir()} == WANTED
    assert (made.folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert made.stderr == ""


def test_the_router_fetches_no_weights(fetch: Any) -> None:
    assert {file.name for file in fetch("house/model", weights=False).folder.iterdir()} == WANTED - {
        "model.safetensors"
    }


@pytest.mark.parametrize("weights", [True, False])
def test_of_a_gguf_file_only_itself_is_fetched(fetch: Any, hub: Any, model: Any, weights: bool) -> None:
    """A router reads its texts there, too."""
    model.files |= {"x.Q4_K_M.gguf": b"GGUF small", "sub/x.F16.gguf": b"GGUF large"}
    made = fetch("house/model:x.Q4_K_M.gguf", weights=weights)
    assert made.folder.read_bytes() == b"GGUF small"
    assert [name for name, _ in hub.bodies()] == ["x.Q4_K_M.gguf"]
    assert fetch("house/model:sub/x.F16.gguf").folder.read_bytes() == b"GGUF large"
    assert fetch("house/model:x.Q4_K_M.gguf", offline=True).folder == made.folder
    assert refused(fetch("house/model:y.gguf")) == "house/model has no file y.gguf; is the name right?"


def test_what_is_there_is_not_fetched_again(fetch: Any, hub: Any) -> None:
    first = fetch("house/model")
    hub.asked.clear()
    second = fetch("house/model")
    assert second.folder == first.folder
    assert hub.bodies() == []
    assert second.said == []


def test_progress_says_how_much_there_is_and_what_it_took(fetch: Any) -> None:
    begin, end = fetch("house/model").said
    assert begin == "downloading house/model: 3 files, 1.0 MB"
    assert end.startswith("downloaded house/model: 1.0 MB in ")


def test_a_connection_that_breaks_again_and_again_is_no_matter(fetch: Any, hub: Any, model: Any) -> None:
    model.breaks_after = 300_000
    made = fetch("house/model")
    assert (made.folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    ranges = [range_ for name, range_ in hub.bodies() if name == "model.safetensors"]
    assert ranges == [None, "bytes=300000-", "bytes=600000-", "bytes=900000-"]


def test_a_download_that_was_ended_goes_on_where_it_was(fetch: Any, hub: Any, model: Any) -> None:
    """In another process, and nothing comes twice."""
    model.breaks_after, model.bodies_left = 300_000, 2
    ended = fetch("house/model")
    assert "gave status 503" in refused(ended)
    model.breaks_after = model.bodies_left = None
    hub.asked.clear()
    made = fetch("house/model")
    assert (made.folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert hub.bodies() == [("model.safetensors", "bytes=600000-")]
    assert made.said[0] == "downloading house/model: 1 files, 1.0 MB, 600.0 kB of them since last time"


def test_what_came_damaged_is_not_served(fetch: Any, model: Any) -> None:
    """A proxy that cuts out a part of the file and says that all is well."""
    model.tags["model.safetensors"] = "0" * 64
    made = fetch("house/model")
    assert "model.safetensors came damaged" in refused(made)


def test_a_revision_is_pinned_and_a_commit_is_never_looked_up_again(fetch: Any, hub: Any) -> None:
    made = fetch("house/model", revision=COMMIT)
    assert made.folder.name == COMMIT
    hub.asked.clear()
    assert fetch("house/model", revision=COMMIT).folder == made.folder
    assert [path for _, path, _ in hub.asked if "house" in path] == []


def test_models_are_kept_in_the_folder_that_was_named(fetch: Any, tmp_path: Path) -> None:
    made = fetch("house/model", folder=str(tmp_path / "volume"))
    assert made.folder.is_relative_to(tmp_path / "volume")
    assert not (tmp_path / "hub").exists()


def test_offline_takes_what_is_there_and_asks_nobody(fetch: Any, hub: Any) -> None:
    made = fetch("house/model")
    hub.asked.clear()
    assert fetch("house/model", offline=True).folder == made.folder
    assert fetch("house/model", {"HF_HUB_OFFLINE": "1"}).folder == made.folder
    assert [path for _, path, _ in hub.asked if "house" in path] == []


def test_a_hub_that_does_not_answer_is_no_matter_for_what_is_there(fetch: Any, hub: Any) -> None:
    made = fetch("house/model")
    assert fetch("house/model", {"HF_ENDPOINT": "http://127.0.0.1:9"}).folder == made.folder
    hub.status = 503
    assert fetch("house/model").folder == made.folder


@pytest.mark.parametrize("kept", ["token file", "HF_TOKEN"])
def test_a_token_opens_a_gated_model(fetch: Any, model: Any, tmp_path: Path, kept: str) -> None:
    model.token, model.gated = SECRET, True
    (tmp_path / "token").write_text(f"{SECRET}\n")
    if kept == "token file":
        assert fetch("house/model", token_file=str(tmp_path / "token")).folder is not None
    else:
        assert fetch("house/model", {"HF_TOKEN": SECRET}).folder is not None


def refused(made: Any) -> str:
    """One line, without the token, and nothing beside it."""
    assert made.folder is None
    assert "\n" not in made.error
    assert SECRET not in made.error + made.stderr
    assert made.stderr == ""
    return str(made.error)


def test_a_gated_model_without_a_token_names_the_terms_and_the_token_file(fetch: Any, hub: Any, model: Any) -> None:
    model.token, model.gated = SECRET, True
    said = refused(fetch("house/model"))
    assert said.startswith(f"house/model is gated: accept its terms at {hub.url}/house/model, and give a token")
    assert "--token-file or HF_TOKEN" in said


def test_a_missing_model_or_revision_is_named(fetch: Any) -> None:
    said = refused(fetch("house/modle"))
    assert "has no model house/modle, or it is private" in said
    said = refused(fetch("house/model", revision="v9"))
    assert said == "house/model has no revision v9; leave out --revision for main."


def test_a_private_model_and_a_wrong_token_name_the_token_file(fetch: Any, model: Any, tmp_path: Path) -> None:
    model.token = "another"
    (tmp_path / "token").write_text(SECRET)
    assert "the token in --token-file may not see it" in refused(
        fetch("house/model", token_file=str(tmp_path / "token"))
    )


def test_no_network_names_the_address_and_the_cures(fetch: Any) -> None:
    said = refused(fetch("house/model", {"HF_ENDPOINT": "http://127.0.0.1:9"}))
    assert said.startswith("http://127.0.0.1:9 cannot be reached for house/model")
    assert "HTTPS_PROXY and HF_ENDPOINT" in said


def test_a_hub_that_is_unwell_is_named_with_its_status(fetch: Any, hub: Any) -> None:
    hub.status = 500
    assert "gave status 500" in refused(fetch("house/model"))


@pytest.mark.parametrize("how", ["--offline on", "HF_HUB_OFFLINE"])
def test_offline_without_the_model_says_who_forbids_it(fetch: Any, how: str) -> None:
    made = (
        fetch("house/model", offline=True) if how == "--offline on" else fetch("house/model", {"HF_HUB_OFFLINE": "1"})
    )
    said = refused(made)
    assert how in said
    assert "fetch it once without" in said


@pytest.mark.parametrize(("text", "words"), [("", "0 words"), ("two words", "2 words"), (None, "cannot be read")])
def test_a_token_file_that_holds_no_token_is_named(fetch: Any, tmp_path: Path, text: str | None, words: str) -> None:
    file = tmp_path / "token"
    if text is not None:
        file.write_text(text)
    said = refused(fetch("house/model", token_file=str(file)))
    assert words in said
    assert str(file) in said


def test_a_disk_that_is_too_small_is_known_before_the_download(hub: Any, model: Any, tmp_path: Path) -> None:
    from space_common.hub import Hub, HubError

    with pytest.raises(HubError, match=r"house/model needs .* GB more in .*, which has .* free: make room"):
        Hub()._check_space("house/model", tmp_path / "models--house--model", 10**18)


def test_the_doctor_says_what_would_be_fetched_and_fetches_none_of_it(hub: Any, tmp_path: Path) -> None:
    run = [sys.executable, "-m", "space_router", "doctor", "--json", "--port", "0", "--model", "house/tiny"]
    folder = tiny_checkpoint(tmp_path / "tiny", "llama", words=True)
    hub.models["house/tiny"] = type(hub.models["house/model"])({f.name: f.read_bytes() for f in folder.iterdir()})
    done = subprocess.run(run, env=hub.environment(tmp_path / "home"), capture_output=True, text=True, timeout=100)
    reported = json.loads(done.stdout)
    assert reported["would_start"] is True, done.stdout
    (note,) = [one["fact"] for one in reported["findings"] if one["state"] == "note"]
    assert note.startswith("house/tiny is not here yet: ")
    assert "model.safetensors" not in [name for name, _ in hub.bodies()]


FLAGS = ["--num-threads", "1", "--calibration-seconds", "0", "--num-blocks", "64"]


@pytest.mark.e2e
def test_a_model_is_downloaded_served_and_served_again_offline(hub: Any, repository: Any, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "tiny", "llama", words=True)
    hub.models["house/tiny"] = repository({file.name: file.read_bytes() for file in folder.iterdir()})
    known = hub.environment(tmp_path / "home")
    flags = ["--model", "house/tiny", "--download-folder", str(tmp_path / "volume"), *FLAGS]
    ids = []
    for extra in ([], ["--offline", "on"]):
        hub.asked.clear()
        with ServerProcess([*flags, *extra], environment=known) as server:
            body = {"prompt": "a b", "max_tokens": 4, "temperature": 0, "return_token_ids": True}
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
            ids.append(answer["choices"][0]["token_ids"])
            said = " ".join(server.lines)
        assert ("worker 0: downloaded house/tiny" in said) == (not extra)
        assert (hub.asked == []) == bool(extra)
    assert ids[0] == ids[1]


@pytest.mark.e2e
def test_a_model_that_is_not_there_ends_the_server_with_one_line(hub: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "space_router", "serve", "--model", "house/none", "--port", "0"]
    run = subprocess.run(command, env=hub.environment(tmp_path / "home"), capture_output=True, text=True, timeout=60)
    assert run.returncode == 2
    (line,) = run.stderr.strip().splitlines()
    assert line.startswith(f"spaceserve: --model='house/none' is no folder, and: {hub.url} has no model house/none")


@pytest.mark.parametrize(
    ("name", "tag"), [("../../x", "a" * 40), ("/etc/x", "a" * 40), ("a\\..\\b", "a" * 40), ("config.json", "../../x")]
)
def test_a_hub_cannot_name_a_file_outside_the_models_folder(
    name: str, tag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub
    from space_common.hub import HubFile

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda url, token: SimpleNamespace(etag=tag, size=1))
    with pytest.raises(OSError, match="the hub names a file outside the model's folder"):
        HubFile("owner/name", "0" * 40, name, tmp_path, None).fetch()
    assert list(tmp_path.iterdir()) == []
