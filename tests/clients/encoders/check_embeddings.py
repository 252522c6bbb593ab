"""sentence-transformers itself: what `/v1/embeddings` answers are the vectors that it makes of the same folder.

Random tiny encoders of each family, and the real all-MiniLM-L6-v2 where `make real` has fetched it.
"""

import importlib.metadata
import json
import os
import sys
import tempfile
import urllib.request
import zipfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "support"))

from checks import check, leave, say, version
from doubles.encoders import FAMILIES, write_encoder
from real_models import folder as models
from sentence_transformers import SentenceTransformer
from space_common.process import ServerProcess

version(importlib.metadata.version("sentence-transformers"))
FLAGS = ["--model", "demo", "--dtype", "float32", "--num-threads", "1", "--num-blocks", "256"]
TEXTS = [
    "The cat sat on the mat.",
    "a",
    "A dog, a cat!",
    "query: what sat on the mat? " * 2,
    "zebra 42",
    "A man is eating food. " * 4,
]
REAL_TEXTS = [
    *TEXTS,
    "Paris is the capital of France. " * 100,  # longer than the real model's window
    "Привет, мир! 🌊",
]


def answered(folder: Path, texts: list[str]) -> list[list[float]]:
    with ServerProcess([*FLAGS, "--embedding-model", str(folder)], start_seconds=120.0) as server:
        body = json.dumps({"input": texts, "truncate_prompt_tokens": -1, "normalize": False}).encode()
        asked = urllib.request.Request(server.url + "/v1/embeddings", body, {"content-type": "application/json"})
        with urllib.request.urlopen(asked, timeout=60.0) as answer:
            return [one["embedding"] for one in json.load(answer)["data"]]


def farthest(folder: Path, texts: list[str]) -> float:
    """The largest difference of a number; each text alone, so that no padding comes in."""
    model = SentenceTransformer(str(folder), device="cpu")
    found = 0.0
    for text, vector in zip(texts, answered(folder, texts), strict=True):
        wanted = model.encode(text).tolist()
        assert len(wanted) == len(vector), (len(wanted), len(vector))
        found = max(found, *(abs(one - other) for one, other in zip(wanted, vector, strict=True)))
    return found


with tempfile.TemporaryDirectory() as place:
    for name in FAMILIES:
        with check(f"the vectors of a random {name} are its own to 1e-5"):
            assert (distance := farthest(write_encoder(Path(place, name), name), TEXTS)) <= 1e-5, distance
    archive = models() / "all-minilm-l6-v2.zip"
    if archive.is_file():
        with check("the vectors of all-MiniLM-L6-v2 are its own to 1e-5, cut at its window"):
            with zipfile.ZipFile(archive) as packed:
                packed.extractall(Path(place, "minilm"))
            assert (distance := farthest(Path(place, "minilm"), REAL_TEXTS)) <= 1e-5, distance
    else:
        say("ok", f"all-MiniLM-L6-v2 is left out: make real brings {archive.name}")
leave()
