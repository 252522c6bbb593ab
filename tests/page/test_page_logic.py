"""The page's modules under node's own test runner: nothing is installed for it."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def test_the_modules_of_the_page_do_what_their_tests_say() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node to run them")
    tests = sorted(HERE.glob("*.test.mjs"))
    written = sum(len(re.findall(r"^test\(", test.read_text(encoding="utf-8"), re.MULTILINE)) for test in tests)
    run = subprocess.run([node, "--test", "--test-reporter=tap", *tests], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout
    assert f"# pass {written}\n" in run.stdout
