"""Certificate files at the start of a server and while they are renewed under it."""

from __future__ import annotations

from pathlib import Path

import pytest
from doubles.router.whole_router import authority, signed
from space_common.certificate import Certificate, CertificateError, CertificateFiles


@pytest.mark.parametrize(
    "content", ["", "no PEM", "-----BEGIN CERTIFICATE-----\nbm9uZQ==\n-----END CERTIFICATE-----\n"]
)
def test_an_authority_that_is_none_is_refused_at_the_start(content: str, tmp_path: Path) -> None:
    own = signed(tmp_path, "server", authority(tmp_path))
    (tmp_path / "ca.crt").write_text(content)
    with pytest.raises(CertificateError):
        CertificateFiles(own.cert, own.key, tmp_path / "ca.crt")


def test_files_that_change_while_they_are_read_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = authority(tmp_path)
    first, second, third = (signed(tmp_path, name, ours) for name in ("first", "second", "third"))
    files = CertificateFiles(first.cert, first.key)
    read = CertificateFiles._read

    def renewed_meanwhile(self: CertificateFiles) -> Certificate:
        found = read(self)
        for new, old in ((third.cert, first.cert), (third.key, first.key)):
            new.replace(old)
        return found

    for new, old in ((second.cert, first.cert), (second.key, first.key)):
        new.replace(old)
    with monkeypatch.context() as patch:
        patch.setattr(CertificateFiles, "_read", renewed_meanwhile)
        before = files.last
        assert files.latest() is before, "half of it might be of the second pair and half of the third"
    assert files.latest().cert == first.cert.read_bytes() != before.cert
