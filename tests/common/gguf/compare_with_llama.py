"""Tokenizers made from GGUF files beside llama.cpp's: the whole comparison.

    python tests/common/gguf/compare_with_llama.py [--python PYTHON] [--lines N] [--seed S] [--write FILE] [GGUF ...]

PYTHON is an interpreter that has llama_cpp (llama-cpp-python); by default this one. Compared are the files given, by
default those in $SPACESERVE_REAL_MODELS, and a small vocabulary for each pre-tokenizer and for SentencePiece. A line a
vocabulary says on how many lines the ids are equal, how many ids stand for equal bytes, and whether the same ids end a
generation. The exit code is 1 where ids or bytes differ for another reason than `KNOWN` has.

--write makes llama_lines.json, the hardest lines with llama.cpp's ids, which test_llama_lines.py holds.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import corpus
import vocabularies
from space_common.gguf.reader import GgufFile
from space_common.gguf.tokenizer import PRE_TOKENIZERS, tokenizer_files
from space_router.text.tokenizer import Tokenizer

KNOWN = {
    "tekken": "llama.cpp leaves combining marks out, and the case of letters beyond ASCII",
    "gpt-4o": "as tekken",
    "deepseek-llm": "llama.cpp leaves white space out of the range of characters that the pattern names",
    "deepseek-coder": "as deepseek-llm",
    "superbpe": "llama.cpp groups ASCII digits only",
}
"""Pre-tokenizers for which llama.cpp simplifies the published pattern."""
NUM_HARD_LINES, LONGEST_HARD_LINE = 240, 36


def llama(python: str, file: Path, requests: Sequence[Mapping[str, Any]]) -> list[Any]:
    run = subprocess.run(
        [python, str(Path(__file__).with_name("llama_ids.py")), str(file)],
        input="".join(json.dumps(request) + "\n" for request in requests),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if run.returncode:
        raise SystemExit(f"{python} llama_ids.py {file} failed:\n{run.stderr[-2000:]}")
    return [json.loads(line) for line in run.stdout.splitlines()]


def load(metadata: Mapping[str, Any]) -> tuple[Tokenizer, list[int]]:
    """The tokenizer made of the metadata, and the ids that end a generation."""
    with tempfile.TemporaryDirectory() as scratch:
        files = tokenizer_files(metadata)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            Path(scratch, name).write_text(files[name], encoding="utf-8")
        ends = json.loads(files["generation_config.json"])["eos_token_id"]
        return Tokenizer.load(Path(scratch)), sorted(ends)


def compare(python: str, file: Path, lines: Sequence[str]) -> tuple[str, bool]:
    """A line for the table, and whether ids and bytes are equal wherever both know the characters."""
    metadata = GgufFile.open(file).metadata
    ours, own_ends = load(metadata)
    num_tokens = len(metadata["tokenizer.ggml.tokens"])
    requests = [{"encode": line, "special": True} for line in lines]
    *theirs, pieces, ends = llama(python, file, [*requests, {"decode": [*range(num_tokens)]}, {"ends": True}])
    pairs = zip(lines, theirs, strict=True)
    different = [line for line, ids in pairs if ours.encode(line, add_special_tokens=False) != ids]
    # Which code points are letters depends on the version of Unicode for those that Python's does not have; "'ſ" is
    # "'s" in another case, which llama.cpp does not know.
    explained = [
        line for line in different if "'ſ" in line or any(unicodedata.category(point) == "Cn" for point in line)
    ]
    texts = sum(ours.bytes_of[id_].hex() == piece for id_, piece in enumerate(pieces))
    said = f"{len(lines) - len(different)} of {len(lines)} lines, {texts} of {num_tokens} texts"
    said += (
        f"; {len(explained)} with code points unassigned in Unicode {unicodedata.unidata_version}, or with 'ſ"
        * bool(explained)
    )
    said += "" if own_ends == ends else f"; ends {own_ends}, llama.cpp {ends}"
    said += "".join(f"\n    {line[:100]!a}" for line in sorted(set(different) - set(explained), key=len)[:5])
    return said, len(different) == len(explained) and texts == num_tokens


def small_files(folder: Path, size: int, num_texts: int) -> Iterator[tuple[str, Path]]:
    """A vocabulary for each different pre-tokenizer by its first name, and two of SentencePiece."""
    texts = [text for text in corpus.lines(num_texts, seed=5) if not any(mark in text for mark in corpus.LOOKALIKES)]
    texts += list(corpus.SENTENCES) * 30
    byte_level = vocabularies.byte_level(texts, size)
    tried = set()
    for pre, pre_tokenizer in PRE_TOKENIZERS.items():
        if pre_tokenizer not in tried:
            tried.add(pre_tokenizer)
            file = folder / f"{pre}.gguf"
            vocabularies.write(file, byte_level | {"tokenizer.ggml.pre": pre})
            yield pre, file
    pieces = vocabularies.sentence_piece(
        [text for text in texts if text.isascii() or text in corpus.SENTENCES], size + 300
    )
    for prefixed in (True, False):
        file = folder / f"sentencepiece-{prefixed}.gguf"
        vocabularies.write(file, pieces | {"tokenizer.ggml.add_space_prefix": prefixed})
        yield file.stem, file


def hard_lines(python: str, small: Sequence[tuple[str, Path]], real: Sequence[Path], lines: Sequence[str]) -> Any:
    """What llama_lines.json holds: vocabularies, and llama.cpp's ids of the lines that they cut most differently."""
    short = [line for line in lines if len(line) <= LONGEST_HARD_LINE]
    requests = [{"encode": line, "special": True} for line in short]
    answers: dict[str, dict[str, list[int]]] = {}
    for name, file in (*small, *((file.name, file) for file in real)):
        theirs = dict(zip(short, llama(python, file, requests), strict=True))
        ours = load(GgufFile.open(file).metadata)[0]
        answers[name] = {
            line: ids for line, ids in theirs.items() if ours.encode(line, add_special_tokens=False) == ids
        }
    byte_level = [name for name, _ in small if name in PRE_TOKENIZERS]

    def num_cuts(line: str) -> int:
        return len({tuple(answers[name].get(line, ())) for name in byte_level})

    hardest = sorted(sorted(short, key=lambda line: (-num_cuts(line), line))[:NUM_HARD_LINES])
    found = []
    for line in hardest:
        groups: dict[str, list[str]] = defaultdict(list)
        for name, ids in answers.items():
            if line in ids:
                groups[json.dumps(ids[line])].append(name)
        found.append({"line": line, "ids": {" ".join(names): json.loads(ids) for ids, names in groups.items()}})
    kinds = {"byte_level": small[0][1], "sentencepiece": small[-1][1]}
    read = {kind: GgufFile.open(file).metadata for kind, file in kinds.items()}
    kept = {
        kind: {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
        for kind, metadata in read.items()
    }
    return {**kept, "lines": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path)
    parser.add_argument("files", nargs="*", type=Path, metavar="GGUF")
    options = parser.parse_args()
    lines = corpus.lines(options.lines, options.seed)
    real = options.files or sorted(Path(os.environ.get("SPACESERVE_REAL_MODELS", ".")).glob("*.gguf"))
    with tempfile.TemporaryDirectory() as scratch:
        if options.write:
            made = hard_lines(options.python, list(small_files(Path(scratch), 700, 3000)), real, lines)
            content = json.dumps(made, ensure_ascii=True, separators=(",", ":")).replace('{"line"', '\n{"line"')
            options.write.write_text(content + "\n", encoding="utf-8")
            return
        small = () if options.files else small_files(Path(scratch), 8000, 20_000)
        wrong = False
        for name, file in (*((file.name, file) for file in real), *small):
            said, equal = compare(options.python, file, lines)
            wrong |= not equal and name not in KNOWN
            sys.stdout.write(f"{name}: {said}" + (f" ({KNOWN[name]})" if name in KNOWN else "") + "\n")
            sys.stdout.flush()
    raise SystemExit(int(wrong))


if __name__ == "__main__":
    main()
