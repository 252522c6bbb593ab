"""The secret of a worker's port: what its file may hold, and which answers to a challenge are taken."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from space_common.worker.secret import (
    CHALLENGE_SECONDS,
    MAX_CHALLENGES,
    METADATA_KEY,
    NotProven,
    RouterProof,
    SecretError,
    SecretFile,
    WorkerSide,
    is_local,
)

OLD, NEW, OTHER = "old-" * 8, "new-" * 8, "other-" * 8


def secret_file(folder: Path, *secrets: str, name: str = "secret") -> SecretFile:
    (folder / name).write_text("\n".join(secrets))
    return SecretFile(folder / name)


def refused(worker: WorkerSide, metadata: Sequence[tuple[str, str | bytes]] = ()) -> NotProven:
    with pytest.raises(NotProven) as caught:
        worker.check(metadata, "peer")
    return caught.value


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has 0 secrets"),
        ("# a comment\n\n", "has 0 secrets"),
        ("short", "line 1: a secret is one word of at least 32 characters"),
        (f"{OLD}\ntwo words {OLD}", "line 2: a secret is one word"),
        ("\n".join([OLD] * 5), "has 5 secrets"),
        ("ä" * 40, "is not ASCII text"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_without_a_word_of_it(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(SecretError, match=message) as caught:
        SecretFile(file)
    assert OLD not in str(caught.value)
    with pytest.raises(SecretError, match="cannot be read"):
        SecretFile(tmp_path / "none")


def test_both_sides_prove_the_secret_and_nothing_else_is_taken(tmp_path: Path) -> None:
    worker = WorkerSide(secret_file(tmp_path, OLD))
    proof = RouterProof.of([OLD.encode()], refused(worker).challenge)
    assert proof.is_answered_by(worker.check(proof.metadata, "router"))
    assert not proof.is_answered_by(b"")
    own = bytes.fromhex(proof.metadata[0][1].split(" ")[2])
    assert not proof.is_answered_by(own), "a worker cannot answer with the router's own proof"


def test_an_answer_is_taken_once_and_in_time(tmp_path: Path) -> None:
    now = [0.0]
    worker = WorkerSide(secret_file(tmp_path, OLD), lambda: now[0])
    proof = RouterProof.of([OLD.encode()], refused(worker).challenge)
    worker.check(proof.metadata, "router")
    assert "has not proven" in refused(worker, proof.metadata).reason, "replayed"
    late = RouterProof.of([OLD.encode()], refused(worker).challenge)
    now[0] = CHALLENGE_SECONDS + 1.0
    refused(worker, late.metadata)


@pytest.mark.parametrize(
    "answer",
    ["", "zz", "00 00 00", " ".join(["00" * 32] * 3), b"\xff\xfe", " ".join(["11" * 32] * 300)],
)
def test_what_is_no_answer_is_refused(answer: str | bytes, tmp_path: Path) -> None:
    worker = WorkerSide(secret_file(tmp_path, OLD))
    assert len(refused(worker, [(METADATA_KEY, answer)]).challenge) == 32


def test_a_challenge_of_another_worker_or_of_nobody_is_refused(tmp_path: Path) -> None:
    one, two = (WorkerSide(secret_file(tmp_path, OLD, name=name)) for name in ("one", "two"))
    elsewhere = RouterProof.of([OLD.encode()], refused(two).challenge)
    refused(one, elsewhere.metadata)
    refused(one, RouterProof.of([OLD.encode()], bytes(32)).metadata)
    with pytest.raises(ValueError, match="32 bytes"):
        RouterProof.of([OLD.encode()], b"")


def test_secrets_are_exchanged_without_a_moment_in_which_nobody_gets_in(tmp_path: Path) -> None:
    for_worker, for_router = (secret_file(tmp_path, OLD, name=name) for name in ("worker", "router"))
    worker = WorkerSide(for_worker)

    def gets_in() -> bool:
        proof = RouterProof.of(for_router.latest(), refused(worker).challenge)
        try:
            return proof.is_answered_by(worker.check(proof.metadata, "router"))
        except NotProven:
            return False

    steps: list[tuple[str, tuple[str, ...]]] = [
        ("worker", (NEW, OLD)), ("router", (OLD, NEW)), ("router", (NEW,)), ("worker", (NEW,)),
    ]  # fmt: skip
    assert gets_in()
    for name, content in steps:
        (tmp_path / "next").write_text("\n".join(content))
        (tmp_path / "next").replace(tmp_path / name)
        assert gets_in(), (name, content)
    (tmp_path / "router").write_text(OLD)
    assert not gets_in(), "the old secret is out"
    (tmp_path / "router").write_text("half a wri")
    assert for_router.latest() == (OLD.encode(),), "the last usable content stays in use"


def test_a_flood_of_calls_without_a_proof_keeps_a_bounded_number_of_challenges(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker = WorkerSide(secret_file(tmp_path, OLD), lambda: 0.0)
    first = refused(worker)
    for _ in range(MAX_CHALLENGES):
        refused(worker, [(METADATA_KEY, "00")])
    assert len(worker._open) == MAX_CHALLENGES
    refused(worker, RouterProof.of([OLD.encode()], first.challenge).metadata)
    assert len(caplog.records) == 1, "one line a minute"


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("unix:/run/w.sock", True), ("127.0.0.1:1", True), ("127.9.9.9:1", True), ("[::1]:1", True),
        ("localhost:1", True), ("0.0.0.0:1", False), ("[::]:1", False), (":1", False), ("10.0.0.1:1", False),
        ("no-such-host.invalid:1", False), ("ipv4:127.0.0.1:1", False), ("unix-abstract:w", False),
        (f"{'x' * 300}:1", False),
    ],
)  # fmt: skip
def test_an_address_is_local_only_if_no_other_machine_can_reach_it(address: str, local: bool) -> None:
    assert is_local(address) is local
    assert is_local(address, resolve=False) is local
