"""Every causal language model of transformers is served as transformers computes it, or refused with a reason.

server/MODELS.md says which; it is made again here, and must say the same.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import transformers
from family_sweep import AS_TRAINED, EQUAL, TRIED_ON_GPU, FamilyResult, families, sweep, to_page
from gpu.ties import FAMILIES as ON_A_GPU
from tiny_checkpoints import FAMILIES

PAGE = Path(__file__).resolve().parents[2] / "server" / "MODELS.md"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[FamilyResult]:
    """Of every family."""
    return [sweep(model_type, tmp_path_factory.mktemp("family")) for model_type in families()]


@pytest.fixture(scope="module")
def third(tmp_path_factory: pytest.TempPathFactory) -> list[FamilyResult]:
    """Of every third family."""
    return [sweep(model_type, tmp_path_factory.mktemp("family")) for model_type in list(families())[::3]]


def check_served_and_refused(results: list[FamilyResult]) -> tuple[int, int]:
    """Fail if one is served wrong, or refused without a reason in words; return how many are served and refused."""
    served = [one for one in results if "served" in (one.cpu, one.gpu)]
    assert [one for one in served if not one.difference < EQUAL] == []
    assert [one for one in served if one.cpu == "served" and not one.exact] == []
    refused = [one for one in results if one.cpu == "refused"]
    odd = re.compile(
        r"Error|Traceback|report above|above report|index out of range|shape|size of tensor|says what cannot be"
    )
    assert [one for one in refused if not one.reason or odd.search(one.reason)] == []
    return len(served), len(refused)


def check_trained(results: list[FamilyResult]) -> int:
    """Fail if a family is trained and does not learn, or is served otherwise; return how many are trained."""
    served = [one for one in results if one.cpu == "served"]
    assert [one.model_type for one in served if "masks" not in one.drafts.sources] == []
    trained = [one for one in served if one.drafts.trained]
    assert [one for one in trained if one.drafts.unlearned or not one.drafts.difference < AS_TRAINED] == []
    assert [one for one in served if bool(one.drafts.trained) == bool(one.drafts.reason)] == []
    return len(trained)


def page() -> str:
    """The page, if it is of this version of transformers; else the test is skipped."""
    text = PAGE.read_text(encoding="utf-8")
    version = re.search(r"models of transformers (\d[\w.]*\w)", text)
    assert version is not None
    if version[1] != transformers.__version__:
        pytest.skip(f"the page is of transformers {version[1]}; this is {transformers.__version__}")
    return text


def sections(text: str) -> dict[str, str]:
    """Return the text below each heading of a page."""
    parts = iter(re.split(r"^##+ (.*)$", text, flags=re.MULTILINE)[1:])
    return dict(zip(parts, parts, strict=True))


@pytest.mark.timeout(900)
def test_of_every_third_family_none_is_served_wrong_and_what_is_trained_learns(third: list[FamilyResult]) -> None:
    served, refused = check_served_and_refused(third)
    assert served > 50
    assert refused > 15
    assert check_trained(third) > 45


@pytest.mark.timeout(900)
def test_the_page_of_models_says_what_becomes_of_every_third(third: list[FamilyResult]) -> None:
    found, said = (sections(text) for text in (to_page(third), page()))
    assert found.keys() == said.keys()
    assert set(found["Families"].splitlines()) <= set(said["Families"].splitlines())
    of_all = ("Refused", "Not tried", "Not trained", "Families")
    assert [name for name in found if name not in of_all and found[name] != said[name]] == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_family_is_served_wrong_and_none_is_refused_in_the_words_of_a_traceback(results: list[FamilyResult]) -> None:
    served, refused = check_served_and_refused(results)
    tried = {one.model_type for one in results if "served" in (one.cpu, one.gpu)}
    assert tried >= {str(fields["model_type"]) for fields in FAMILIES.values()}
    assert served > 150
    assert refused > 60


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_is_trained_learns_and_is_served_as_it_was_trained(results: list[FamilyResult]) -> None:
    assert check_trained(results) > 140


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_page_of_models_says_what_becomes_of_them(results: list[FamilyResult]) -> None:
    assert page() == to_page(results), "python tests/support/family_sweep.py > server/MODELS.md"


def test_the_families_that_the_page_calls_tried_on_a_gpu_are() -> None:
    assert {str(FAMILIES[name]["model_type"]) for name in ON_A_GPU} == TRIED_ON_GPU
