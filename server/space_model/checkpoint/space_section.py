"""The `space` section of config.json, or flags: a checkpoint's masks and draft head."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from space_kernels.step.draft_head import DraftHeadForm

from space_model.geometry.draft_layout import MOST_HEAD_DRAFTS
from space_model.model_error import InvalidSpaceSection
from space_model.released_adapters import USUAL_MASKS, AdapterFormat, MaskInputs

MOST_MASKS = 1024
"""Far above what is laid out, and few enough to be listed."""


@dataclass(frozen=True)
class DraftHeadSection:
    """The draft head's file, form, and two sizes."""

    file: str
    hidden: int
    embedding_scale: float
    form: DraftHeadForm


@dataclass(frozen=True)
class RecurrentHeadSection:
    """The recurrent draft head's file, two sizes, and the drafts that it was trained to make."""

    file: str
    hidden: int
    embedding_scale: float
    num_drafts: int
    acceptance: tuple[float, ...] = ()  # measured conditional acceptance of draft 1, 2, …; empty: unknown


@dataclass(frozen=True)
class SpaceSection:
    """A checkpoint's masks: ids of its vocabulary, or embeddings of a gated adapter."""

    mask_ids: tuple[int, ...]  # id of mask 1, 2, …; a shared id is repeated; empty with an adapter, so no id is banned
    adapter: str | None  # file or folder beside config.json
    num_masks: int | None  # masks per group; None: as many as the adapter has
    draft_head: DraftHeadSection | None
    acceptance: tuple[float, ...] = ()  # measured conditional acceptance of draft 1, 2, …; empty: unknown
    base_sha256: str | None = None  # of the weights that the adapter was made for; None: not declared
    mask_inputs: MaskInputs | None = None  # of a released adapter; None: mask embeddings of its own
    recurrent_head: RecurrentHeadSection | None = None  # drafts without masks

    @classmethod
    def parse(
        cls, config: dict[str, object], *, mask_ids: Sequence[int] | None, num_masks: int | None, vocab_size: int
    ) -> SpaceSection:
        """Parse the section of config.json; given arguments override it."""
        section = config.get("space") or {}
        if not isinstance(section, dict):
            raise InvalidSpaceSection('"space" in config.json must be an object.')
        masks = cls._masks(section, mask_ids, num_masks, vocab_size)
        return replace(masks, recurrent_head=_recurrent_head(section.get("recurrent_head")))

    @classmethod
    def _masks(
        cls, section: dict[str, Any], mask_ids: Sequence[int] | None, num_masks: int | None, vocab_size: int
    ) -> SpaceSection:
        """Parse what the section says of masks and their draft head."""
        if section.get("adapter") is not None:
            return cls._gated(section, mask_ids, num_masks)
        declared = section.get("mask_token_ids") or []
        if not isinstance(declared, list):
            raise InvalidSpaceSection(f'"mask_token_ids" in config.json must be a list of ids; got {declared!r}.')
        ids = list(declared if mask_ids is None else mask_ids)
        if not all(isinstance(id, int) and not isinstance(id, bool) for id in ids):
            raise InvalidSpaceSection(f"Mask ids must be integers; got {ids}.")
        count = num_masks
        if count is None and mask_ids is None:
            count = section.get("num_masks")
        if count is None:
            count = len(ids)
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise InvalidSpaceSection(f"num_masks must be 0 or more; got {count}.")
        if count > MOST_MASKS:
            raise InvalidSpaceSection(f"num_masks must be {MOST_MASKS} at most; got {count}.")
        if count and not ids:
            raise InvalidSpaceSection(f"{count} masks need mask ids: one shared by all, or one per position.")
        if len(ids) == 1:
            ids = ids * count
        if len(ids) < count:
            raise InvalidSpaceSection(f"{count} masks need 1 or {count} mask ids; got {len(ids)}.")
        ids = ids[:count]
        for id in ids:
            if not 0 <= id < vocab_size:
                raise InvalidSpaceSection(
                    f"Mask id {id} is outside the vocabulary of {vocab_size}. "
                    "`spaceserve convert` adds mask rows to a checkpoint."
                )
        head = _draft_head(section.get("draft_head")) if ids else None
        return cls(tuple(ids), None, count, head, _acceptance(section.get("acceptance")))

    @classmethod
    def _gated(cls, section: dict[str, object], mask_ids: Sequence[int] | None, num_masks: int | None) -> SpaceSection:
        """Parse a section with an adapter: `mask_token_ids` is ignored, and `num_masks` may be absent."""
        adapter, count = section["adapter"], section.get("num_masks") if num_masks is None else num_masks
        if not isinstance(adapter, str) or not adapter:
            raise InvalidSpaceSection(
                f'"adapter" in the space section of config.json must name a file; got {adapter!r}.'
            )
        if mask_ids is not None:
            raise InvalidSpaceSection("The masks of a gated adapter have no ids: leave the mask ids out.")
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 0):
            raise InvalidSpaceSection(f"num_masks must be 0 or more; got {count!r}.")
        if count == 0:
            return cls((), None, 0, None)
        head, acceptance = _draft_head(section.get("draft_head")), _acceptance(section.get("acceptance"))
        inputs = _mask_inputs(section, count)
        count = count if inputs is None else inputs.num_masks
        return cls((), adapter, count, head, acceptance, _base_sha256(section.get("base_sha256")), inputs)

    def check_base(self, name: str, sha256: Callable[[], str]) -> None:
        """Check that the adapter was made for the weights of `name`; `sha256` hashes them, and is called only if
        needed. Raises InvalidSpaceSection."""
        if self.base_sha256 is not None and (found := sha256()) != self.base_sha256:
            raise InvalidSpaceSection(
                f"The adapter was made for weights with the sha256 {self.base_sha256}; those of {name} have {found}. "
                "Give it with the weights that it was made for, or leave it out."
            )


def declared_files(section: Mapping[str, Any]) -> list[str]:
    """Return the names that a `space` section gives to the files and folders beside config.json."""
    heads = (section.get(head) for head in ("draft_head", "recurrent_head"))
    names = [section.get("adapter"), *(head.get("file") for head in heads if isinstance(head, dict))]
    return [name for name in names if isinstance(name, str) and name]


def _base_sha256(section: object) -> str | None:
    if section is None:
        return None
    if not isinstance(section, str) or not re.fullmatch("[0-9a-f]{64}", section):
        raise InvalidSpaceSection(
            f'"base_sha256" in the space section of config.json must be 64 hexadecimal digits; got {section!r}.'
        )
    return section


def _mask_inputs(section: dict[str, object], num_masks: int | None) -> MaskInputs | None:
    """Return what the masks of a released adapter read; None for an adapter with mask embeddings."""
    name, id_ = section.get("adapter_format", AdapterFormat.SPACE), section.get("mask_token_id")
    if name not in list(AdapterFormat):
        raise InvalidSpaceSection(f"There is no adapter format {name!r}; there are {', '.join(AdapterFormat)}.")
    if id_ is not None and (not isinstance(id_, int) or isinstance(id_, bool)):
        raise InvalidSpaceSection(f'"mask_token_id" in the space section must be an id; got {id_!r}.')
    form = AdapterFormat(str(name))
    if form is AdapterFormat.SPACE:
        return None
    return MaskInputs(form, USUAL_MASKS[form] if num_masks is None else num_masks, id_)


def _acceptance(section: object) -> tuple[float, ...]:
    if section is None:
        return ()
    if not isinstance(section, list) or not all(isinstance(p, int | float) and 0 <= p <= 1 for p in section):
        raise InvalidSpaceSection(f'"acceptance" in the space section of config.json must be chances; got {section!r}.')
    return tuple(float(p) for p in section)


def _draft_head(section: object) -> DraftHeadSection | None:
    if section is None:
        return None
    if not isinstance(section, dict):
        raise InvalidSpaceSection('"draft_head" in the space section of config.json must be an object.')
    name = section.get("form", DraftHeadForm.MLP)
    if name not in list(DraftHeadForm):
        raise InvalidSpaceSection(f"There is no draft head of form {name!r}; there are {', '.join(DraftHeadForm)}.")
    try:
        return DraftHeadSection(
            str(section["file"]), _whole(section["hidden"]), _scale(section["embedding_scale"]), DraftHeadForm(name)
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidSpaceSection(
            f'"draft_head" in the space section of config.json needs file, hidden and embedding_scale: {error!r}'
        ) from error


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{value!r} is no whole number")
    return value


def _scale(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
        raise ValueError(f"{value!r} is no scale")
    return float(value)


def _recurrent_head(section: object) -> RecurrentHeadSection | None:
    if section is None:
        return None
    if not isinstance(section, dict):
        raise InvalidSpaceSection('"recurrent_head" in the space section of config.json must be an object.')
    try:
        head = RecurrentHeadSection(
            str(section["file"]),
            _whole(section["hidden"]),
            _scale(section["embedding_scale"]),
            _whole(section["num_drafts"]),
            _acceptance(section.get("acceptance")),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidSpaceSection(
            '"recurrent_head" in the space section of config.json needs file, hidden, embedding_scale and num_drafts: '
            f"{error!r}"
        ) from error
    if not 1 <= head.num_drafts <= MOST_HEAD_DRAFTS:
        raise InvalidSpaceSection(
            f"A recurrent head makes 1 to {MOST_HEAD_DRAFTS} drafts; config.json says {head.num_drafts}."
        )
    return head
