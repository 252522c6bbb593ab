"""The rows of a step: their relative layout, and the KV cache slots that each of them sees."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import is_

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]


# chain rows of all sequences           mask rows of all sequences                    padding
# [0 ........... num_chain_rows)        [num_chain_rows ........ num_rows)            [num_rows ... num_padded)
#  K, V go to the pages first            K, V live in the step only                    writes nothing, result unused
@dataclass(frozen=True, eq=False)
class RowPattern:
    """The rows of a step, with positions relative to the first chain row of their sequence.

    A sequence has two runs of rows: its chain rows, and its mask rows, group after group. Consecutive steps with the
    same draft layout share the pattern, so everything derived from it alone is cached in `parts`.
    """

    chain_runs: Sequence[range]  # per sequence: flat row numbers of its chain rows; positions are consecutive
    mask_runs: Sequence[range]  # per sequence: flat row numbers of its mask rows
    offsets: Ints  # [rows] position relative to the sequence's first chain row
    reach: Ints  # [rows] slots, from that row on, that the row may attend: its own or its base row's offset plus one
    group: Ints  # [rows] a number shared by the masks of one group of one sequence, -1 for chain rows
    num_chain_rows: int
    num_padded: int
    parts: dict[Hashable, object] = field(default_factory=dict)  # filled on first use, shared by all steps
    drafts: Ints | None = None  # [S] last chain rows, which may be rejected; None: none are

    @cached_property
    def chains(self) -> tuple[Ints, Ints]:
        """First flat row and number of the chain rows, per sequence."""
        return _bounds(self.chain_runs)

    @cached_property
    def masks(self) -> tuple[Ints, Ints]:
        """First flat row and number of the mask rows, per sequence."""
        return _bounds(self.mask_runs)

    @cached_property
    def owner(self) -> Ints:
        """[rows] sequence of each row."""
        owner = np.empty(len(self.offsets), dtype=np.int64)
        for number, (chain, masks) in enumerate(zip(self.chain_runs, self.mask_runs, strict=True)):
            owner[chain.start : chain.stop] = number
            owner[masks.start : masks.stop] = number
        return owner


def _bounds(runs: Sequence[range]) -> tuple[Ints, Ints]:
    starts = np.array([run.start for run in runs], dtype=np.int64)
    return starts, np.array([len(run) for run in runs], dtype=np.int64)


@dataclass(frozen=True, eq=False)
class StepRows:
    """The rows of one step: a pattern, and the position and pages of each sequence.

    A row attends the slots of its sequence up to its reach (fewer with a sliding window); a mask row also attends
    itself and the masks before it in its group.
    """

    pattern: RowPattern
    starts: Ints  # [S] position of each sequence's first chain row
    pages: Sequence[Sequence[int] | Ints]  # per sequence: block numbers, position 0 onwards
    block_size: int
    device: torch.device
    parts: dict[Hashable, object] = field(default_factory=dict)  # filled on first use, shared by all layers
    states: Ints | None = None  # [S] slot of each sequence's recurrent states; None: that of its number

    @property
    def state_slots(self) -> Ints:
        """[S] slot of each sequence's recurrent states."""
        return np.arange(len(self.starts)) if self.states is None else self.states

    @property
    def num_drafts(self) -> Ints:
        """[S] last chain rows of each sequence, which may be rejected."""
        drafts = self.pattern.drafts
        return np.zeros(len(self.starts), dtype=np.int64) if drafts is None else drafts

    @property
    def chain_runs(self) -> Sequence[range]:
        """Flat row numbers of the chain rows, per sequence."""
        return self.pattern.chain_runs

    @property
    def num_chain_rows(self) -> int:
        """Number of chain rows, which come first and store their keys and values."""
        return self.pattern.num_chain_rows

    @cached_property
    def positions(self) -> Ints:
        """[rows] absolute position."""
        return self.starts[self.pattern.owner] + self.pattern.offsets

    @cached_property
    def written(self) -> Ints:
        """[S] slots that hold keys and values after this step's store."""
        return self.starts + self.pattern.chains[1]

    @cached_property
    def page_table(self) -> Ints:
        """[S, most pages] block numbers, padded with 0; the last step's array if no sequence got a new page.
        Arrays of pages are immutable, so an identical array means identical pages; a list may have grown."""
        known = self.pattern.parts.get(_PageTable)
        if isinstance(known, _PageTable) and all(map(is_, known.pages, self.pages)):
            return known.table
        counts = list(map(len, self.pages))
        table = np.zeros((len(counts), max(counts, default=0)), dtype=np.int64)
        for row, pages, count in zip(table, self.pages, counts, strict=True):
            row[:count] = pages
        if all(isinstance(pages, np.ndarray) for pages in self.pages):
            self.pattern.parts[_PageTable] = _PageTable(self.pages, table)
        return table

    def chain_slots(self) -> Ints:
        """Return the slot that each chain row writes: block number · block size + offset in the block."""
        chain = self.pattern.num_chain_rows
        positions = self.positions[:chain]
        blocks = positions // self.block_size
        pages = self.page_table[self.pattern.owner[:chain], blocks]
        return positions + (pages - blocks) * self.block_size


@dataclass(frozen=True, slots=True)
class _PageTable:
    """The page table of the last step with a pattern."""

    pages: Sequence[Sequence[int] | Ints]
    table: Ints


@dataclass(frozen=True, eq=False)
class PatternTables:
    """A row pattern on a device, constant over steps with the same layout. All int32."""

    chain_first: Tensor  # [S] first flat row of the sequence's chain
    num_chain: Tensor  # [S]
    mask_first: Tensor  # [S] first flat row of the sequence's masks
    num_masks: Tensor  # [S]
    owner: Tensor  # [rows] sequence
    offset: Tensor  # [rows] position relative to the sequence's first chain row
    reach: Tensor  # [rows] slots, from that row on, that the row may attend
    group: Tensor  # [rows] number shared by the masks of a group, -1 for chain rows
    group_first: Tensor  # [rows] flat row of the first mask of the row's group; for a chain row the next row
    num_rows: int  # without padding
    num_padded: int
    num_chain_rows: int
    rows_per_sequence: Ints  # [S] on the host: chain and mask rows together
    known_tiles: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, pattern: RowPattern, device: torch.device) -> PatternTables:
        """Return the pattern's tables, uploaded on first use."""
        known = pattern.parts.get((cls, device))
        if not isinstance(known, PatternTables):
            known = pattern.parts[cls, device] = _upload(pattern, device)
        return known

    @property
    def num_sequences(self) -> int:
        """S."""
        return len(self.rows_per_sequence)

    @cached_property
    def has_masks(self) -> bool:
        """Whether there are mask rows; their keys are not in the pages."""
        return self.num_rows > self.num_chain_rows

    def tiles(self, queries_per_kv: int, height: int) -> Tensor:
        """Return [tiles, 2] int32: sequence, and number of the tile of `height` packed rows in it.
        A sequence's last tiles come first: they see the most keys and would finish last in a prefill."""
        known = self.known_tiles.get((queries_per_kv, height))
        if known is None:
            counts = -(-self.rows_per_sequence * queries_per_kv // height)
            pairs = [(number, tile) for number, count in enumerate(counts) for tile in reversed(range(count))]
            table = np.array(pairs, dtype=np.int32).reshape(-1, 2)
            known = self.known_tiles[queries_per_kv, height] = torch.from_numpy(table).to(self.owner.device)
        return known


# one sequence's slots
# [0 ........ start)      [start ...... start + num_written)    [...
#  earlier steps' keys     this step's, after the store           never read
@dataclass(frozen=True, eq=False)
class StepTables:
    """Positions and pages of a step's sequences. The tensors may be updated between replays of a CUDA graph.
    A sequence that stores nothing (a dead one, or padding of the batch) has `num_written` 0."""

    pattern: PatternTables
    starts: Tensor  # [S] int32 position of each sequence's first chain row
    page_table: Tensor  # [S, P] int32 block numbers; arbitrary beyond a sequence's last page
    block_size: int
    num_written: Tensor  # [S] int32 number of leading chain rows that store keys and values

    @classmethod
    def of(cls, rows: StepRows) -> StepTables:
        """Return the tables of a step, built on first use and shared by all layers."""
        known = rows.parts.get((cls, rows.device))
        if not isinstance(known, StepTables):
            pattern = PatternTables.of(rows.pattern, rows.device)
            starts = torch.from_numpy(rows.starts.astype(np.int32)).to(rows.device)
            table = _page_table(rows)
            known = cls(pattern, starts, table, rows.block_size, pattern.num_chain)
            rows.parts[cls, rows.device] = known
        return known

    def as_rows(self, pattern: RowPattern) -> StepRows:
        """Return rows for which `StepTables.of` gives these tables.
        Their `starts` and `pages` are empty, because only the device knows the positions."""
        device = self.starts.device
        parts: dict[Hashable, object] = {(StepTables, device): self}
        return StepRows(pattern, np.empty(0, dtype=np.int64), (), self.block_size, device, parts=parts)

    @property
    def capacity(self) -> int:
        """Positions that the page table covers; launch grids may depend on this alone."""
        return self.page_table.shape[1] * self.block_size

    def slots(self) -> Tensor:
        """Return [chain rows] int64: the slot (block number · block size + offset) a row stores to; -1: none."""
        chain = self.pattern.num_chain_rows
        owner, offset = self.pattern.owner[:chain].long(), self.pattern.offset[:chain].long()
        positions = self.starts[owner] + offset
        blocks = (positions // self.block_size).clamp_(max=self.page_table.shape[1] - 1)
        slots = self.page_table[owner, blocks].long() * self.block_size + positions % self.block_size
        return torch.where(offset < self.num_written[owner], slots, -1)


@dataclass(frozen=True, slots=True)
class _Uploaded:
    """The page table of the last step with a pattern, and its copy on the device."""

    host: Ints
    device: Tensor


def _page_table(rows: StepRows) -> Tensor:
    """Return the step's page table on the device, uploaded only if some sequence got a new page."""
    host, name = rows.page_table, (_Uploaded, rows.device)
    known = rows.pattern.parts.get(name)
    if not isinstance(known, _Uploaded) or known.host is not host:
        known = _Uploaded(host, torch.from_numpy(host.astype(np.int32)).to(rows.device))
        rows.pattern.parts[name] = known
    return known.device


def _upload(pattern: RowPattern, device: torch.device) -> PatternTables:
    """Upload all tables in one copy, each aligned to 16 bytes."""
    group = pattern.group
    group_first = np.arange(1, len(group) + 1)
    masks = np.arange(pattern.num_chain_rows, len(group))
    if len(masks):
        opens = np.ones(len(masks), dtype=bool)
        opens[1:] = (group[masks[1:]] != group[masks[:-1]]) | (pattern.owner[masks[1:]] != pattern.owner[masks[:-1]])
        group_first[masks] = np.maximum.accumulate(np.where(opens, masks, 0))
    parts = {
        "chain_first": pattern.chains[0],
        "num_chain": pattern.chains[1],
        "mask_first": pattern.masks[0],
        "num_masks": pattern.masks[1],
        "owner": pattern.owner,
        "offset": pattern.offsets,
        "reach": pattern.reach,
        "group": group,
        "group_first": group_first,
    }
    begins = np.cumsum([0, *(-(-len(part) // 4) * 4 for part in parts.values())]).tolist()
    packed = np.zeros(begins[-1], dtype=np.int32)
    for part, begin in zip(parts.values(), begins, strict=False):
        packed[begin : begin + len(part)] = part
    uploaded = torch.from_numpy(packed).to(device)
    tensors = {
        name: uploaded[begin : begin + len(part)] for (name, part), begin in zip(parts.items(), begins, strict=False)
    }
    return PatternTables(
        chain_first=tensors["chain_first"],
        num_chain=tensors["num_chain"],
        mask_first=tensors["mask_first"],
        num_masks=tensors["num_masks"],
        owner=tensors["owner"],
        offset=tensors["offset"],
        reach=tensors["reach"],
        group=tensors["group"],
        group_first=tensors["group_first"],
        num_rows=len(pattern.offsets),
        num_padded=pattern.num_padded,
        num_chain_rows=pattern.num_chain_rows,
        rows_per_sequence=pattern.chains[1] + pattern.masks[1],
    )
