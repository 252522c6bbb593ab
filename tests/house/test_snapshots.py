"""What users, clients and operators see is what it was when `snapshots/` was taken, and no test was lost.

`python tests/house/snapshots/update.py` takes all snapshots anew (`update.py help` one of them, `update.py lost` names
lost tests with what `snapshots/pytest_id_map.txt` needs). Differences that are meant are in `snapshots/allowed.toml`.
"""

import difflib
import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import interface
import pytest
import torch
from interface import SNAPSHOTS, IdMap, TestId
from space_kernels.build import cpu_library

ALLOWED: dict[str, Any] = tomllib.loads((SNAPSHOTS / "allowed.toml").read_text(encoding="utf-8"))
REMOVED: dict[str, str] = ALLOWED["removed"]


def difference(before: Sequence[str], now: Sequence[str]) -> list[str]:
    lines = difflib.unified_diff(before, now, "snapshot", "now", lineterm="", n=0)
    return [line for line in lines if not line.startswith("@@")]


def reworded(text: str) -> str:
    for before, after in ALLOWED["reworded"].items():
        text = text.replace(before, after)
    return text


def expected_help(command: str, text: str, removed: Sequence[str]) -> list[str]:
    """Entries of a snapshot's help, without the commands below it that are not there any more."""
    kept = []
    gone = {each.removeprefix(command).strip() for each in removed if each.startswith(f"{command} ")}
    for entry in filter(None, map(reworded, interface.entries(text))):
        first = entry.removeprefix(f"{command} ").partition(" ")[0]
        if first not in gone:
            kept.append(without_choices(entry, gone))
    return kept


def without_choices(entry: str, gone: set[str]) -> str:
    """`{a,b,c}` without those that are gone."""
    return re.sub(
        r"\{([\w,-]+)\}", lambda found: "{" + ",".join(w for w in found[1].split(",") if w not in gone) + "}", entry
    )


def without_flag(entries: Sequence[str], flag: str) -> list[str]:
    """Without its own entry, and without it in usage and examples."""
    return [re.sub(rf" \[{flag}\]|( \\)? {flag}\b", "", entry) for entry in entries if not entry.startswith(flag)]


@pytest.fixture(scope="module")
def served() -> interface.Served:
    return interface.served()


@pytest.fixture(scope="module")
def answers() -> dict[str, interface.Answer]:
    return interface.help_answers(ALLOWED["moved"])


def test_the_openapi_document_is_as_it_was(served: interface.Served) -> None:
    before = reworded(interface.read("openapi")).splitlines()
    assert difference(before, served.openapi.splitlines()) == []


def test_metrics_have_their_names_and_labels(served: interface.Served) -> None:
    assert difference(interface.read("metrics").splitlines(), served.metrics.splitlines()) == []


def test_the_protocol_is_as_it_was() -> None:
    assert difference(interface.read("proto").splitlines(), interface.proto_text().splitlines()) == []


def test_environment_variables_are_those_there_were() -> None:
    before = set(interface.read("variables").splitlines())
    assert before - interface.variables((*interface.PRODUCT, "tests")) == set()  # a harness may have moved there
    assert interface.variables() - before == set()


def test_every_command_helps_as_it_did_or_says_where_it_went(answers: Mapping[str, interface.Answer]) -> None:
    snapshot = interface.split_help(interface.read("help"))
    assert snapshot.keys() == answers.keys() == set(interface.commands())
    removed = [name for name in REMOVED if answers[name].status]
    wrong = {}
    for name, text in snapshot.items():
        answer = answers[name]
        if name in removed:
            lines = (answer.stdout + answer.stderr).strip().splitlines()
            if answer.status != 2 or len(lines) != 1 or REMOVED[name] not in lines[0]:
                wrong[name] = [f"status {answer.status}", *lines]
            continue
        now = interface.entries(answer.stdout)
        for flag, commands in ALLOWED["new_flags"].items():
            if name in commands:
                now = without_flag(now, flag)
        if answer.status or (found := difference(expected_help(name, text, removed), now)):
            wrong[name] = [answer.stderr] if answer.status else found
    assert wrong == {}


def test_what_is_allowed_is_about_commands_that_there_are() -> None:
    named = {*REMOVED, *ALLOWED["moved"], *(name for names in ALLOWED["new_flags"].values() for name in names)}
    assert named <= set(interface.commands())


@pytest.fixture(scope="module")
def known() -> IdMap:
    return IdMap.read(SNAPSHOTS / "pytest_id_map.txt")


@pytest.fixture(scope="module")
def before() -> Counter[TestId]:
    return interface.unfold_ids((SNAPSHOTS / "pytest_ids.txt").read_text(encoding="utf-8"))


def test_the_map_is_about_tests_that_there_were(known: IdMap, before: Counter[TestId]) -> None:
    there = {part for stem, name, _ in before for part in (stem, f"{stem}::{name}")}
    assert known.named() - there == set()


def test_no_test_function_is_lost(known: IdMap, before: Counter[TestId]) -> None:
    assert interface.lost_functions(before, interface.written_tests(), known) == []


def test_no_test_is_lost_with_its_parameters(
    request: pytest.FixtureRequest, known: IdMap, before: Counter[TestId]
) -> None:
    """Asked of the run that this test is in: collecting every test once more would take a minute."""
    if [Path(word).resolve() for word in request.config.args] != [interface.ROOT / "tests"]:
        pytest.skip("only a run over tests/ collects every test")
    if torch.cuda.is_available():
        pytest.skip("the snapshot is of a machine without a GPU, where kernels have other parameters")
    recorder = next(each for each in request.config.pluginmanager.get_plugins() if isinstance(each, interface.Recorder))
    others = {kind for kinds in cpu_library.KINDS.values() for kind in kinds} - set(cpu_library.own_kinds())
    expected = {one: number for one, number in before.items() if not others & set(one[2].strip("[]").split("-"))}
    assert interface.lost_ids(Counter(expected), recorder.ids, known) == []  # without kinds of other processors


def test_a_lost_test_is_named_and_a_moved_one_is_found(tmp_path: Path) -> None:
    ids = [("test_a", "test_x", "[1]"), ("test_a", "test_x", "[2]"), ("test_b", "test_y", ""), ("test_b", "test_z", "")]
    before = Counter([*ids, ("test_w", "test_w_w", "[w0-x]")])
    assert interface.unfold_ids(interface.fold_ids(before + Counter(ids[:1]))) == before + Counter(ids[:1])
    (tmp_path / "map").write_text("file test_a test_c test_d\ntest test_b::test_y test_c::test_yy\nword w v\n")
    known = IdMap.read(tmp_path / "map")
    functions = Counter(
        {("test_d", "test_x"): 1, ("test_c", "test_yy"): 1, ("test_e", "test_z"): 1, ("test_v", "test_w_v"): 1}
    )
    assert interface.lost_functions(before, functions, known) == ["test_b::test_z (there is one in test_e)"]
    now = Counter([("test_d", "test_x", "[1]"), ("test_c", "test_yy", ""), ("test_w", "test_v_v", "[v0-x]")])
    assert interface.lost_ids(before, now, known) == ["test_a::test_x[2]", "test_b::test_z"]
    (tmp_path / "map").write_text(
        "gone test_b with it\nparameters test_a::test_x by machine\nfile test_a test_d\nword w v\n"
    )
    assert interface.lost_ids(before, now, IdMap.read(tmp_path / "map")) == []


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("usage: x [-h]\n         [--a A]\n\nDoes\nthings.", ["usage: x [-h] [--a A]", "Does things."]),
        ("options:\n  --a A  what\n         it is\n  --b", ["options:", "--a A what it is", "--b"]),
        ("{a,b}\n  a     that\n        which\n  b     this", ["{a,b}", "a that which", "b this"]),
        ("group:\n  --a A\n      what\n\n  --b B\n      that", ["group:", "--a A what", "--b B that"]),
    ],
)
def test_help_is_compared_by_entry_however_its_lines_are_wrapped(text: str, entries: list[str]) -> None:
    assert interface.entries(text) == entries
