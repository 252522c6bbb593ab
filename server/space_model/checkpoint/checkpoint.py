"""A checkpoint on disk: its files, hashes and configs; PEFT folders; writing a folder as a whole.

A checkpoint may name files in its own folder, and blobs of the hub's cache that links in it lead to.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from space_common import default_model
from space_common.default_model import DEFAULT_BASE, DefaultModelUnavailable
from space_common.files import is_contained, is_local_name, sha256_of
from space_common.gguf.find import SUFFIX, GgufError, find_gguf
from space_common.other_formats import other_format
from space_common.tokenizer.special_tokens import named_tokens, token_text
from space_common.tokenizer.tokenizer_files import TokenizerFileError, published_tokenizer, tokenizer_json

from space_model.checkpoint.quantized_formats import is_of_mlx, read_format
from space_model.checkpoint.translation import Translation, translate, typed_by_class
from space_model.model_error import CheckpointNotFound, UnsupportedModel
from space_model.released_adapters import AdapterFormat, split_place

if TYPE_CHECKING:
    from space_common.gguf.reader import GgufFile


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in this file; a byte order mark is skipped. Raises CheckpointNotFound."""
    try:
        loaded = json.loads(file.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise CheckpointNotFound(f"{file} is not JSON: {error}. Was it copied whole?") from error
    except RecursionError:
        raise CheckpointNotFound(f"{file} is nested too deeply to be read. Fetch it again.") from None
    if not isinstance(loaded, dict):
        raise CheckpointNotFound(f"{file} holds no JSON object.")
    return loaded


INDEX = "model.safetensors.index.json"


def read_index(index: Path) -> dict[str, str]:
    """Return tensor -> name of a file in the index's folder. Raises CheckpointNotFound."""
    found = read_object(index).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise CheckpointNotFound(f"{index} names no files: it has no weight_map. Fetch it again.")
    for tensor, name in found.items():
        if not isinstance(name, str) or not name:
            raise CheckpointNotFound(f"{index} says that {tensor} is in {name!r}, which is no file. Fetch it again.")
    return found


def indexed_files(index: Path) -> tuple[Path, ...]:
    """Return the files that the index names; each must exist in its folder. Raises CheckpointNotFound."""
    folder = index.parent
    names = sorted(set(read_index(index).values()))
    for name in names:
        if not is_local_name(name):
            raise CheckpointNotFound(
                f"{index} names {name!r}, which is outside its folder. Only files of the checkpoint are read: fetch it "
                "again, or correct the index."
            )
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointNotFound(
            f"{index} names {missing[0]}, which is not there ({len(missing)} of {len(names)} files are missing). "
            "Was the download finished?"
        )
    for name in names:
        if not is_contained(folder / name, folder):
            raise CheckpointNotFound(
                f"{folder / name} is a link to {(folder / name).resolve()}, outside its folder. Copy the file to "
                f"{folder}, or give the folder that it is in."
            )
    return tuple(folder / name for name in names)


PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PEFT_MASKS = "mask_embeddings.safetensors"  # which a gated adapter has beyond a LoRA

_NO_WEIGHTS = {"PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "ADAPTION_PROMPT", "CPT"}
"""PEFT types that extend the prompt or its keys, and cannot be merged into base weights."""


def describe_peft(folder: Path) -> str:
    """Return a description such as `a LoRA adapter of peft for meta-llama/Llama-3.2-1B`."""
    config = read_object(folder / PEFT_CONFIG)
    kind = str(config.get("peft_type") or "unnamed").upper()
    what = f"an adapter of type {kind}"
    if kind == "LORA":
        what = "a DoRA adapter" if config.get("use_dora") else "a LoRA adapter"
    return f"{what} of peft for {_base(config)}"


def how_to_merge(folder: Path) -> str:
    """Return how to merge the adapter in this folder into a model."""
    config = read_object(folder / PEFT_CONFIG)
    if str(config.get("peft_type")).upper() in _NO_WEIGHTS:
        return "It cannot be merged into weights, and prompts of its kind are not served: serve the base without it."
    return (
        f"Merge it into its base, and serve the result: peft.AutoPeftModelForCausalLM.from_pretrained({str(folder)!r})"
        ".merge_and_unload().save_pretrained(NEW_FOLDER), with the base's tokenizer beside it."
    )


def refuse_as_model(folder: Path, section: object) -> None:
    """Refuse an adapter's folder as a model, unless its `space` section declares the adapter as a draft adapter. Raises
    CheckpointNotFound."""
    if not (folder / PEFT_CONFIG).is_file() or (isinstance(section, dict) and section.get("adapter") is not None):
        return
    said = describe_peft(folder)
    if (folder / PEFT_MASKS).is_file():
        base = _base(read_object(folder / PEFT_CONFIG))
        raise CheckpointNotFound(
            f"{folder} is a gated adapter, and no model: it drafts for {base}. Serve that one with it: "
            f"--model {base} --adapter NAME={folder}"
        )
    if any(folder.glob("model*.safetensors")):
        raise CheckpointNotFound(
            f"{folder} has a model and {said} beside it, which is not applied to it ({PEFT_CONFIG}). "
            f"{how_to_merge(folder)} Or move {PEFT_CONFIG} out of the folder, if the model is meant without it."
        )
    raise CheckpointNotFound(f"{folder} is {said}, and no model: it has no weights of its own. {how_to_merge(folder)}")


def _base(config: dict[str, Any]) -> str:
    return str(config.get("base_model_name_or_path") or "its base")


def tokenizer_eos(read_json: Callable[[str], Mapping[str, Any]]) -> int | None:
    """Return the EOS id; None if the tokenizer names none, or one that is not in the vocabulary. `read_json` returns a
    file of the checkpoint, empty if absent."""
    config = read_json("tokenizer_config.json")
    text = token_text(named_tokens(config, read_json("special_tokens_map.json")).get("eos_token"))
    if text is None:
        return None
    for id_, token in (config.get("added_tokens_decoder") or {}).items():
        if token_text(token) == text:
            return int(id_)
    content = read_json("tokenizer.json")
    for token in content.get("added_tokens") or ():
        if token.get("content") == text:
            return int(token["id"])
    vocabulary = (content.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, Mapping):
        found = vocabulary.get(text)
        return None if found is None else int(found)
    return next((id_ for id_, (piece, *_) in enumerate(vocabulary) if piece == text), None)  # Unigram: [piece, score]


def has_experts(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json describes a mixture of experts. transformers stacks the experts' weights."""
    if any(config.get(name) for name in ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")):
        return True
    return any(has_experts(part) for name in TEXT_CONFIGS if isinstance(part := config.get(name), Mapping))


TEXT_CONFIGS = ("text_config", "thinker_config", "llm_config", "language_config")
"""Fields of config.json that describe the text part of a model that also sees or hears."""


_WANTED = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken"]

Fetch = Callable[[str], Path]
"""Returns the folder of a hub id, or the file `owner/repo:file`. Raises CheckpointNotFound."""


@dataclass(frozen=True)
class Checkpoint:
    """A folder with config.json and safetensors files, a GGUF file, or a folder whose `space` section names one as
    base. With a base, config, weights and tokenizer come from the base; the folder only holds what its `space` section
    names."""

    name: str  # as the user named it
    folder: Path  # has config and tokenizer; for a GGUF file, the folder they were extracted to
    config: dict[str, Any]  # config.json
    weights: tuple[Path, ...]  # the model's safetensors files, or its GGUF file
    home: Path  # where the files of the `space` section are: the folder itself, even with a base; or the GGUF file
    gguf: GgufFile | None = None  # its header
    translation: Translation | None = None  # if it is served as another family; `config` is then that one's
    unread_kind: str | None = None  # the type of most weights of a GGUF file that is not downloaded yet

    @classmethod
    def open(cls, path: str | Path | Checkpoint, fetch: Fetch | None = None) -> Checkpoint:
        """Open `demo`, a folder, a GGUF file, or a hub id (OWNER/NAME or OWNER/NAME:FILE.gguf). `fetch` downloads a hub
        id (None: with huggingface_hub). An open checkpoint is returned as it is."""
        if isinstance(path, Checkpoint):
            return path
        fetch = fetch or _from_the_hub
        folder = folder_of(str(path), fetch)
        config_file = folder / "config.json"
        config = read_object(config_file) if config_file.is_file() else {}
        section = config.get("space")
        if isinstance(section, dict) and section.get("base") is not None:
            return cls._on_base(str(path), folder, section, fetch)
        refuse_as_model(folder, section)
        try:
            file = find_gguf(folder)
        except GgufError as error:
            raise CheckpointNotFound(str(error)) from error
        if file is not None:
            return cls._of_gguf(str(path), file, folder, section)
        if not config_file.is_file():
            cure = other_format(folder) or "Give the folder of a checkpoint."
            raise CheckpointNotFound(f"{folder} has no config.json. {cure}")
        config = with_quantization(folder, config)
        translation = translate(config, str(path))
        served = typed_by_class(config) if translation is None else dict(translation.config)
        return cls(str(path), folder, served, _weights(folder), folder, translation=translation)

    @classmethod
    def _of_gguf(cls, name: str, file: Path, given: Path, section: Any) -> Checkpoint:
        """Open a GGUF file, found at `given`; `section`: the `space` section of the folder that contains it."""
        from space_common.gguf.reader import GgufFile  # imported late: other formats need no gguf package
        from space_common.gguf.view import view_of

        try:
            header = GgufFile.open(file)
            folder = view_of(header)
        except GgufError as error:
            raise UnsupportedModel(str(error)) from error
        config = read_object(folder / "config.json")
        if section is None:
            return cls(name, folder, config, (file,), file, header)
        return cls(name, folder, config | {"space": section}, (file,), given, header)

    @classmethod
    def _on_base(cls, name: str, home: Path, section: dict[str, Any], fetch: Fetch) -> Checkpoint:
        """Open the checkpoint that `base` names (a path, also relative to `home`, a hub id, or demo)."""
        where = section["base"]
        if not isinstance(where, str) or not where:
            raise CheckpointNotFound(
                f'"base" in the space section of {home} must be a path or a hub id; got {where!r}.'
            )
        try:
            base = cls.open(home / where if (home / where).exists() else where, fetch)
        except CheckpointNotFound as error:
            raise CheckpointNotFound(
                f"{home} has no weights of its own, and its base cannot be had: {error}"
            ) from error
        if base.home != (base.folder if base.gguf is None else base.gguf.path):
            raise CheckpointNotFound(f"{home} is based on {where}, which has a base itself; name that one.")
        config = base.config | {"space": section}
        return cls(name, base.folder, config, base.weights, home, base.gguf, base.translation)

    @property
    def kept_as(self) -> str | None:
        """Return how the file's quantised weights can be held in memory: the type of most of a GGUF's, such as Q4_K, or
        the name of a format in PACKED_FORMATS, such as AWQ; None: only dequantised, or they are not quantised."""
        if self.translation is not None:
            return None
        if self.unread_kind is not None:
            return self.unread_kind
        if self.gguf is None:
            form = read_format(self.config, self.name)
            return form.kept_name if form is not None and form.stays_packed else None
        kind = next(iter(self.gguf.kinds), None)
        return None if kind in (None, "F32", "F16", "BF16") else kind

    def read_json(self, name: str) -> dict[str, Any]:
        """Return a JSON file of the folder; empty if absent. tokenizer.json may be made of an older file."""
        file = self.tokenizer_file() if name == "tokenizer.json" else self.folder / name
        return read_object(file) if file is not None and file.is_file() else {}

    def tokenizer_file(self) -> Path | None:
        """Return tokenizer.json, made in the cache of an older file if there is only that; None if there is neither.
        Raises CheckpointNotFound."""
        try:
            return tokenizer_json(self.folder)
        except TokenizerFileError as error:
            raise CheckpointNotFound(str(error)) from error

    def model_hash(self) -> str:
        """Hash config.json and the headers of the weights (names, dtypes, shapes, offsets), which is cheap."""
        digest = hashlib.sha256((self.folder / "config.json").read_bytes())
        if self.gguf is not None:
            digest.update(self.gguf.header_hash.encode())
            return digest.hexdigest()
        for file in self.weights:
            with file.open("rb") as stream:
                start = stream.read(8)
                if len(start) < 8:
                    raise CheckpointNotFound(f"{file} is empty, or cut short. Fetch it again.")
                (length,) = struct.unpack("<Q", start)
                digest.update(stream.read(length))
        return digest.hexdigest()

    def weights_sha256(self) -> str:
        """Hash the weights file; of several, hash their digests in order. Reads each byte once per process."""
        digests = [sha256_of(file) for file in self.weights]
        return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()

    def tokenizer_hash(self) -> str:
        """Return the sha256 of tokenizer.json or of the older file in its place, "" if there is none."""
        file = published_tokenizer(self.folder)
        return "" if file is None else hashlib.sha256(file.read_bytes()).hexdigest()

    def eos_ids(self, vocab_size: int) -> tuple[int, ...]:
        """Return the EOS ids of the generation config (else the config), as in transformers, and the tokenizer's EOS;
        also the end of a turn where the generation config names ChatML (the first Qwen, whose code stops there). Ids
        outside the vocabulary are dropped."""
        text = next((part for name in TEXT_CONFIGS if isinstance(part := self.config.get(name), dict)), {})
        generation = self.read_json("generation_config.json")
        sources = (generation, self.config, text)
        said: Any = next((source["eos_token_id"] for source in sources if source.get("eos_token_id") is not None), [])
        ids = [*(said if isinstance(said, list) else [said]), tokenizer_eos(self.read_json)]
        if odd := [id for id in ids if id is not None and type(id) is not int]:
            file = "generation_config.json" if generation.get("eos_token_id") is not None else "config.json"
            raise UnsupportedModel(
                f"eos_token_id in the {file} of {self.name} is {odd[0]!r}, and ids are whole numbers. Fetch the file "
                "of the original checkpoint."
            )
        if generation.get("chat_format") == "chatml":
            added = self.read_json("tokenizer.json").get("added_tokens") or ()
            ids += [int(token["id"]) for token in added if token.get("content") == "<|im_end|>"]
        return tuple(dict.fromkeys(id for id in ids if id is not None and 0 <= id < vocab_size))


def adapter_section(path: str | Path) -> tuple[Path, dict[str, Any]]:
    """Return the folder of a gated adapter, and its config; a PEFT folder needs no config.json. `path` may begin with
    a released adapter's format (`uno:FOLDER`), which the config then declares."""
    form, place = split_place(str(path))
    folder = folder_of(place, _from_the_hub)
    config = read_object(folder / "config.json") if (folder / "config.json").is_file() else {}
    section = config.get("space")
    declares = isinstance(section, dict) and section.get("adapter") is not None
    if form is not AdapterFormat.SPACE:
        if not (folder / PEFT_CONFIG).is_file():
            raise CheckpointNotFound(f"{folder} has no {PEFT_CONFIG}; an adapter of {form} is a folder with one.")
        own = section if isinstance(section, dict) else {}
        if own.get("adapter_format", form) != form:
            raise CheckpointNotFound(f"{folder} declares the adapter format {own['adapter_format']!r}, not {form}.")
        return folder, {"space": {"adapter": "."} | own | {"adapter_format": str(form)}}
    if (folder / PEFT_CONFIG).is_file() and not declares:
        return folder, {"space": {"adapter": "."}}
    if config:
        return folder, config
    raise CheckpointNotFound(f"{folder} has neither config.json nor adapter_config.json; give an adapter's folder.")


_QUANTIZATION_FILES = {
    "hf_quant_config.json": ("modelopt", "quantization"),
    "quant_config.json": ("awq", None),
    "quantize_config.json": ("gptq", None),
}
"""Files beside config.json in which older checkpoints declare their quantisation: the method, and the key that holds it
(None: the whole file)."""


def with_quantization(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with a quantization_config, taken from another field or file if needed."""
    if config.get("quantization_config") is not None:
        return config
    if isinstance(section := config.get("quantization"), dict) and is_of_mlx(section):
        return config | {"quantization_config": section}
    if isinstance(said := config.get("compression_config"), dict):  # compressed-tensors before its version 0.4
        return config | {"quantization_config": {"quant_method": "compressed-tensors"} | said}
    for name, (method, key) in _QUANTIZATION_FILES.items():
        if (folder / name).is_file():
            whole = read_object(folder / name)
            section = whole if key is None else whole.get(key)
            return config | {"quantization_config": {**(section or {}), "quant_method": method}}
    return config


def folder_of(path: str, fetch: Fetch) -> Path:
    """Return the folder, or the GGUF file, that a user named by its path or hub id. Raises CheckpointNotFound."""
    packaged = default_model.packaged(path)
    if packaged is not None:
        return packaged
    folder = Path(path).expanduser()
    if folder.is_dir() or (folder.is_file() and folder.suffix.lower() == SUFFIX):
        return folder
    if folder.is_file():
        raise CheckpointNotFound(f"{path} is a file; give the folder of a checkpoint, or a GGUF file (*{SUFFIX}).")
    if path == DEFAULT_BASE:
        return fetch(path)
    if path.lower().endswith(SUFFIX) and ":" not in path:
        raise CheckpointNotFound(f"There is no file {path}.")
    if path.startswith(("/", ".", "~")) or path.partition(":")[0].count("/") != 1:
        raise CheckpointNotFound(f"There is no folder {path}, and it is no hub id (owner/name) either.")
    return fetch(path)


def _from_the_hub(path: str) -> Path:
    if path == DEFAULT_BASE:
        try:
            return default_model.fetch()
        except DefaultModelUnavailable as error:
            raise CheckpointNotFound(str(error)) from error
    import huggingface_hub  # imported late: a local checkpoint needs no network library

    repository, _, file = path.partition(":")
    try:
        if file:
            return Path(huggingface_hub.hf_hub_download(repository, file))
        return Path(huggingface_hub.snapshot_download(path, allow_patterns=_WANTED))
    except (OSError, ValueError) as error:
        raise CheckpointNotFound(f"There is no folder {path}, and the hub did not give {path}: {error}") from error


def _weights(folder: Path) -> tuple[Path, ...]:
    index = folder / INDEX
    if index.is_file():
        return indexed_files(index)
    if (folder / "model.safetensors").is_file():
        return (folder / "model.safetensors",)
    pickled = sorted(folder.glob("pytorch_model*.bin"))
    if pickled:
        raise CheckpointNotFound(
            f"{folder} has its weights as {pickled[0].name}, which can run code when it is opened. "
            f"Turn it into safetensors first: spaceserve convert {folder} NEW_FOLDER"
        )
    parts = sorted(folder.glob("*-of-*.safetensors"))
    if parts:
        raise CheckpointNotFound(
            f"{folder} has {parts[0].name} and no {index.name}, which says what is in which file. Fetch it, too."
        )
    of_gguf = f"If it is of a repository with GGUF files, name one of them: OWNER/NAME:FILE{SUFFIX}"
    raise CheckpointNotFound(
        f"{folder} has no model.safetensors (and no model.safetensors.index.json). {other_format(folder) or of_gguf}"
    )


PARTIAL, REPLACED = ".partial", ".replaced"  # suffixes of the folder being written, and of the one it replaces


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder, which replaces `folder` after the block; if the block raises, it is removed. model.partial
    written .......... | model the old ......... | | the new model.replaced | the old | if killed here, both are
    complete; the next call finishes"""
    folder = folder.resolve()  # if it is a link, write to the disk that it leads to
    partial, replaced = folder.with_name(folder.name + PARTIAL), folder.with_name(folder.name + REPLACED)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # a partial model would only fill the disk
        raise
    if folder.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        folder.rename(replaced)
    partial.rename(folder)
    shutil.rmtree(replaced, ignore_errors=True)
