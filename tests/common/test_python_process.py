"""A program that another one starts has no current folder on its path."""

import subprocess
import sys
from pathlib import Path

import pytest
from space_common.process import module_command, safe_environment


def test_what_a_started_program_starts_itself_has_no_current_folder_on_its_path_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('the json.py of the current folder was executed')")
    monkeypatch.chdir(tmp_path)
    child = "import json, subprocess, sys; subprocess.run([sys.executable, '-m', 'json.tool', '--help'], check=True)"
    ran = subprocess.run([sys.executable, "-P", "-c", child], env=safe_environment(), capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_folders_of_pythonpath_stay_on_the_path(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "from_the_tree.py").write_text("print('found')")
    environment = safe_environment({"PYTHONPATH": str(tmp_path / "tree")})
    ran = subprocess.run(module_command("from_the_tree"), env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout == "found\n"
