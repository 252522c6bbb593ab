"""ROUGE-L, the longest common word subsequence of reference and candidate (Lin 2004, §3), without stemming.

Words are runs of a-z and 0-9 after lowercasing, as in the reference implementation. A text without words scores 0.
"""

import re
from collections import Counter
from collections.abc import Sequence

_NO_WORD = re.compile(r"[^a-z0-9]+")


def words(text: str) -> list[str]:
    """Return the text's words."""
    return [word for word in _NO_WORD.split(text.lower()) if word]


def rouge_l(reference: str, candidate: str) -> float:
    """Return the F-measure of the longest common subsequence of both texts' words, 0 to 1."""
    wanted, given = words(reference), words(candidate)
    return _f_measure(_lcs_length(wanted, given), len(wanted), len(given))


def rouge_l_sum(reference: str, candidate: str) -> float:
    """Return the summary-level F-measure: sentences are lines; each reference line scores the union of its common
    subsequences with all candidate lines, with each word occurrence used at most once on either side."""
    wanted, given = ([words(line) for line in text.split("\n") if line] for text in (reference, candidate))
    left_wanted, left_given = (Counter(word for line in lines for word in line) for lines in (wanted, given))
    num_common = 0
    for line in wanted:
        in_union = sorted({at for other in given for at in _lcs_positions(line, other)})
        for word in (line[at] for at in in_union):
            if left_wanted[word] > 0 and left_given[word] > 0:
                num_common += 1
                left_wanted[word] -= 1
                left_given[word] -= 1
    return _f_measure(num_common, sum(map(len, wanted)), sum(map(len, given)))


def _f_measure(num_common: int, num_wanted: int, num_given: int) -> float:
    """Return the harmonic mean of recall (common / wanted) and precision (common / given)."""
    return 2 * num_common / (num_wanted + num_given) if num_common else 0.0


def _lcs_length(a: Sequence[str], b: Sequence[str]) -> int:
    """Return the length of the longest common subsequence, by len(a) additions of integers of len(b) bits.

    Bit j of `row` is 0 where the common subsequence of a[:i] and b[:j+1] is one longer than of a[:i] and b[:j]
    (Hyyrö 2004).
    """
    where: dict[str, int] = {}
    for at, word in enumerate(b):
        where[word] = where.get(word, 0) | 1 << at
    all_bits = (1 << len(b)) - 1
    row = all_bits
    for word in a:
        matches = row & where.get(word, 0)
        row = (row + matches | row & ~matches) & all_bits
    return len(b) - row.bit_count()


def _lcs_positions(reference: Sequence[str], candidate: Sequence[str]) -> list[int]:
    """Return the positions in `reference` of one longest common subsequence; ties move back in the reference first, as
    in the reference implementation."""
    num_rows, num_columns = len(reference), len(candidate)
    table = [[0] * (num_columns + 1) for _ in range(num_rows + 1)]
    for i in range(1, num_rows + 1):
        for j in range(1, num_columns + 1):
            same = reference[i - 1] == candidate[j - 1]
            table[i][j] = table[i - 1][j - 1] + 1 if same else max(table[i - 1][j], table[i][j - 1])
    found: list[int] = []
    i, j = num_rows, num_columns
    while i and j:
        if reference[i - 1] == candidate[j - 1]:
            i, j = i - 1, j - 1
            found.append(i)
        elif table[i][j - 1] > table[i - 1][j]:
            j -= 1
        else:
            i -= 1
    return found[::-1]
