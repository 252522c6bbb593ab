"""No program starts another one with the current folder on its path."""

import re
from pathlib import Path


def test_no_program_of_ours_starts_another_without_the_safe_path(root: Path, files: list[Path]) -> None:
    product = [path for path in files if path.parts[0] in ("proto", "kernels", "router", "server", "docker")]
    unsafe = re.compile(r'sys\.executable,\s*(?!"-P"|"-I")"-|(?:python3?|PYTHON_IN_VENV\)) -m space_', re.DOTALL)
    texts = {path: (root / path).read_text() for path in (*product, Path("Makefile"), Path("Dockerfile"))
             if path.suffix in {".py", ".sh"} or path.name.endswith(("Makefile", "Dockerfile"))}  # fmt: skip
    code = {path: re.sub(r'"""(?:.|\n)*?"""|prog="[^"]*"|Example: [^"]*', "", text) for path, text in texts.items()}
    assert [str(path) for path, text in code.items() if unsafe.search(text)] == []
