"""API keys that are added, revoked and expire while the server runs."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from space_router import api_keys
from space_router.api_keys import (
    LOOK_SECONDS,
    ApiKey,
    ApiKeys,
    KeyLimits,
    KeySource,
    RateLimits,
    read_keys,
    warn_of_plain_keys,
)
from space_router.config import settings
from space_router.errors import ConfigError, RateLimited
from space_router.metrics import Metrics


def digest(secret: str) -> str:
    return "sha256:" + hashlib.sha256(secret.encode()).hexdigest()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Keyed:
    """Keys of a file, and a clock that has moved on by a look whenever they are asked for."""

    def __init__(self, file: Path, text: str = "one name=first\ntwo name=second\n") -> None:
        file.write_text(text)
        self.clock = Clock()
        self.changes: list[Sequence[ApiKey]] = []
        source = KeySource(str(file))
        self.keys = ApiKeys(source.read(), source, self.changes.append, clock=self.clock)

    def name_of(self, secret: str) -> str | None:
        self.clock.now += LOOK_SECONDS
        return self.keys.name_of(f"Bearer {secret}")


def rewrite(file: Path, text: str) -> None:
    file.write_text(text)
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1_000_000))  # whatever the file system's clock says


def replace(file: Path, text: str) -> None:
    other = file.with_suffix(".new")
    other.write_text(text)
    other.rename(file)


def switch(file: Path, text: str) -> None:
    """As Kubernetes renews a secret: a link to a folder is replaced by one to another."""
    folder = file.parent / f"..{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    folder.mkdir()
    (folder / "keys").write_text(text)
    link = file.parent / "..link"
    link.symlink_to(folder)
    link.rename(file.parent / "..data")
    if not file.is_symlink():
        file.unlink()
        file.symlink_to(Path("..data") / "keys")


@pytest.mark.parametrize("change", [rewrite, replace, switch])
def test_a_revoked_key_is_refused_and_a_new_one_taken_however_the_file_changes(
    change: Callable[[Path, str], None], tmp_path: Path
) -> None:
    keyed = Keyed(tmp_path / "keys")
    assert (keyed.name_of("one"), keyed.name_of("two"), keyed.name_of("three")) == ("first", "second", None)
    for _ in range(2):
        change(tmp_path / "keys", "two name=second\nthree name=third operator=yes\n")
        assert (keyed.name_of("one"), keyed.name_of("two"), keyed.name_of("three")) == (None, "second", "third")
        assert keyed.keys.is_operator("third")
        change(tmp_path / "keys", "one name=first\n")
        assert (keyed.name_of("one"), keyed.name_of("two"), keyed.name_of("three")) == ("first", None, None)
        assert not keyed.keys.is_operator("third")
        (tmp_path / "keys").with_suffix(".new").unlink(missing_ok=True)
        if change is switch:
            break


def test_the_file_is_looked_at_once_a_second_and_at_a_signal(tmp_path: Path) -> None:
    keyed = Keyed(tmp_path / "keys")
    replace(tmp_path / "keys", "two name=second\n")
    keyed.clock.now += 0.5
    assert keyed.keys.name_of("Bearer one") == "first"
    keyed.keys.refresh(is_forced=True)
    assert keyed.keys.name_of("Bearer one") is None
    assert len(keyed.changes) == 1
    replace(tmp_path / "keys", "one name=first\n")
    assert keyed.keys.name_of("Bearer two") == "second"
    keyed.clock.now += 1.0
    assert keyed.keys.name_of("Bearer two") is None, "within a second"


@pytest.mark.parametrize("text", ["", "# no key\n", "one nonsense\n", None, "one name=x\ntwo name=x\n"])
def test_a_file_that_cannot_be_used_changes_nothing_and_is_logged_without_its_words(
    text: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keyed = Keyed(tmp_path / "keys", "secret-one name=first\n")
    if text is None:
        (tmp_path / "keys").unlink()
    else:
        replace(tmp_path / "keys", text)
    for _ in range(3):
        assert keyed.name_of("secret-one") == "first"
    assert [record.levelname for record in caplog.records] == ["WARNING"], "once for each change"
    assert "stay as they are" in caplog.text
    replace(tmp_path / "keys", "secret-two name=second\n")
    assert (keyed.name_of("secret-one"), keyed.name_of("secret-two")) == (None, "second")
    assert "secret-" not in caplog.text


def test_a_digest_stands_for_its_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keyed = Keyed(tmp_path / "keys", f"{digest('one')} name=first\n{digest('two').upper().replace('SHA', 'sha')}\n")
    assert keyed.name_of("one") == "first"
    assert keyed.name_of("two") == hashlib.sha256(b"two").hexdigest()[:16]
    assert keyed.name_of(digest("one")) is None
    with caplog.at_level(logging.WARNING):
        warn_of_plain_keys(read_keys(str(tmp_path / "keys"), ""), "keys")
        assert caplog.text == ""
        (tmp_path / "plain").write_text(f"three\n{digest('four')}\n")
        warn_of_plain_keys(read_keys(str(tmp_path / "plain"), ""), "plain")
    assert "has 1 API keys that can be read" in caplog.text


@pytest.mark.parametrize(
    ("date", "moment"),
    [
        ("2027-01-31", 1801353600.0),
        ("2027-01-31T18:00:00Z", 1801353600.0 + 18 * 3600),
        ("2027-01-31T18:00:00+02:00", 1801353600.0 + 16 * 3600),
    ],
)
def test_a_key_is_refused_from_the_moment_that_it_expires(date: str, moment: float, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"one name=first expires={date}\ntwo name=second\n")
    now = Clock()
    keys = ApiKeys(read_keys(str(tmp_path / "keys"), ""), now=now)
    now.now = moment - 1
    assert keys.name_of("Bearer one") == "first"
    now.now = moment
    assert keys.name_of("Bearer one") is None
    assert keys.name_of("Bearer two") == "second"


def test_every_key_is_compared_in_constant_time_whichever_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ApiKeys(read_keys(None, "one,two,three"))
    compared: list[tuple[bytes, bytes]] = []

    def compare_digest(given: bytes, known: bytes) -> bool:
        compared.append((given, known))
        return given == known

    monkeypatch.setattr(api_keys.hmac, "compare_digest", compare_digest)
    digests = [hashlib.sha256(key.encode()).digest() for key in ("one", "two", "three")]
    for secret in ("one", "two", "three", "none of them"):
        compared.clear()
        keys.name_of(f"Bearer {secret}")
        given = hashlib.sha256(secret.encode()).digest()
        assert [known for one, known in compared if one == given] == digests


def test_no_flag_takes_a_key() -> None:
    """Other users of the machine can read the words of a command line."""
    assert "api_key_file" in settings()
    assert settings().keys() & {"api_key", "api_keys", "key", "keys"} == set()


def test_a_digest_in_the_environment_that_is_none_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="64 hex digits"):
        read_keys(None, "sha256:abc")


def test_limits_follow_the_file_and_requests_under_way_still_count() -> None:
    clock = Clock()
    limits = RateLimits([ApiKey.of("one", "first", KeyLimits(concurrency=1))], KeyLimits(), Metrics(), clock)
    with limits["first"].request():
        limits.update_keys([ApiKey.of("one", "first", KeyLimits(concurrency=2)), ApiKey.of("two", "second")])
        with limits["first"].request(), pytest.raises(RateLimited), limits["first"].request():
            pass
        limits.update_keys([ApiKey.of("two", "second", KeyLimits(requests_per_minute=1))])
        assert "first" in limits, "its request is still under way"
    with limits["second"].request(), pytest.raises(RateLimited), limits["second"].request():
        pass
