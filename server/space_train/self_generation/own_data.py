"""Training data without a data set: the model writes its prompts, where they do not come with the package, and answers.

    prompts (journal) -> user turns -> filters -> answers -> filters -> examples

Each stage depends only on the stages before it, which are kept in the folder of the run: a run that was killed goes on
with the same texts.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from space_common.repetition import is_looping
from space_model.checkpoint.checkpoint import Checkpoint

from space_train.data.decontamination import EvaluationTexts, word_grams
from space_train.data.examples import Example
from space_train.run_folder import OWN_PROMPTS, OWN_TEXT_FILE, OWN_USER_TURNS, fingerprint
from space_train.self_generation.prompts import OwnPrompt, PromptMaker, PromptSource
from space_train.self_generation.self_generate import (
    TEMPERATURES,
    OwnText,
    OwnTextRecipe,
    Question,
    TextWorker,
    keep_asked,
    read_own_texts,
    write_asked,
)
from space_train.train_plan import OwnTextError

USER_TOKENS = 128  # ids of a user's turn at most; a longer one is dropped, because it did not end
NEAR_GRAM, NEAR_SHARE = 5, 0.5
"""A user's turn is a near-duplicate if more than this share of its n-grams of words is in the turns before it."""


@dataclass(frozen=True)
class OwnDataRecipe:
    """What the prompts depend on, besides the installed packages."""

    seed: int
    longest: int  # ids of a prompt at most
    max_tokens: int  # of an answer
    template: str | None  # digest of the chat template

    def is_of(self, journal: dict[str, Any], count: int | None) -> bool:
        """Return whether `journal` has prompts of this recipe, and as many as asked for (None: any number)."""
        return journal.get("recipe") == asdict(self) and count in (None, len(journal["prompts"]))


def kept_prompts(out: Path, recipe: OwnDataRecipe, count: int | None) -> list[OwnPrompt] | None:
    """Return the prompts of the journal in `out`, or None if it has none or was made otherwise."""
    try:
        journal = json.loads((out / OWN_PROMPTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not recipe.is_of(journal, count):
        return None
    return [OwnPrompt(PromptSource(kind), tuple(ids), heat, seed) for kind, ids, heat, seed in journal["prompts"]]


class OwnData:
    """The prompts of a run, and the texts in its folder `out` that continue them."""

    def __init__(
        self,
        out: Path,
        prompts: Sequence[OwnPrompt],
        recipe: OwnDataRecipe,
        maker: PromptMaker,
        end_ids: Iterable[int],
        evaluation: EvaluationTexts | None,
    ) -> None:
        self.out, self.prompts, self.recipe, self.maker = out, prompts, recipe, maker
        self.end_ids, self._evaluation = frozenset(end_ids), evaluation

    def keep_prompts(self) -> None:
        """Write the journal of the prompts."""
        lines = [[str(p.source), p.ids, p.temperature, p.seed] for p in self.prompts]
        partial = (self.out / OWN_PROMPTS).with_suffix(".partial")
        partial.write_text(json.dumps({"recipe": asdict(self.recipe), "prompts": lines}), encoding="utf-8")
        partial.replace(self.out / OWN_PROMPTS)

    def digest(self) -> bytes:
        """Return a digest of the prompts."""
        return hashlib.sha256(repr([prompt.question for prompt in self.prompts]).encode()).digest()

    def forget_others(self, checkpoint: Checkpoint) -> float:
        """Keep only the texts that `write` would request. Return the share of the answers' ids that is kept."""
        model = fingerprint(checkpoint)
        turns = OwnTextRecipe(model, USER_TOKENS, eos_stops=True)
        keep_asked(self.out / OWN_USER_TURNS, turns, frozenset(self._user_questions))
        answers = replace(turns, max_tokens=self.recipe.max_tokens)
        return keep_asked(self.out / OWN_TEXT_FILE, answers, frozenset(self.questions()))

    def write(self, worker: TextWorker, until: float | None = None) -> Iterator[tuple[int, float]]:
        """Write the user turns, then the answers; yield rows and seconds of each. `until`: when writing ends, on
        `time.monotonic`, and that of user turns in half of the time to it."""
        turns = (OWN_USER_TURNS, USER_TOKENS, "user turns")
        answers = (OWN_TEXT_FILE, self.recipe.max_tokens, "own texts")
        for name, most, what in (turns, answers):
            if asked := self._user_questions if name == OWN_USER_TURNS else self.questions():
                file = self.out / name
                ends = until
                if until is not None and name == OWN_USER_TURNS:
                    ends = (time.monotonic() + until) / 2
                found = write_asked(worker, asked, max_tokens=most, file=file, what=what, until=ends)
                yield found.counts.num_rows, found.seconds

    @property
    def _user_questions(self) -> list[Question]:
        return [prompt.question for prompt in self.prompts if prompt.source is PromptSource.USER]

    def questions(self) -> list[Question]:
        """Return the questions whose answers are learnt from; those of user turns as far as they are written."""
        return self._questions(Counter())

    def _questions(self, dropped: Counter[str]) -> list[Question]:
        found = [prompt.question for prompt in self.prompts if prompt.source is not PromptSource.USER]
        asked, file = frozenset(self._user_questions), self.out / OWN_USER_TURNS
        turns = [text for text in read_own_texts(file) if text.question in asked] if file.exists() else []
        for number, (text, ids) in enumerate(self._usable_turns(turns, dropped)):
            found.append((ids, TEMPERATURES[number % len(TEMPERATURES)], text.seed))
        return found

    def examples(self) -> tuple[list[Example], str]:
        """Return the answers that pass the filters, with their prompts as context, and a line on them. An answer
        without an end is kept: it is text of the model as far as it goes, and no end is learnt from it. Raises
        OwnTextError if none passes."""
        dropped, num_cut, num_unfinished = Counter[str](), 0, 0
        asked, found, seen = frozenset(self._questions(dropped)), list[Example](), set[tuple[int, ...]]()
        file = self.out / OWN_TEXT_FILE
        texts = [text for text in read_own_texts(file) if text.question in asked] if file.exists() else []
        if missing := len(asked) - len(texts):
            dropped["answers not begun in time"] = missing
        for text in texts:
            if reason := self._fault(text, seen):
                dropped[f"answers {reason}"] += 1
                continue
            seen.add(text.output)
            num_unfinished += text.is_unfinished
            num_cut += text.output[-1] not in self.end_ids and not text.is_unfinished
            learned = [False] * len(text.prompt) + [True] * len(text.output)
            found.append(Example([*text.prompt, *text.output], learned))
        left_out = ", ".join(f"{count:,} {reason}" for reason, count in sorted(dropped.items())) or "none"
        if not found:
            raise OwnTextError(f"None of the model's {len(self.prompts)} texts can be learnt from: {left_out}.")
        kinds = Counter(prompt.source for prompt in self.prompts)
        num_ids = sum(example.num_learned for example in found)
        return found, (
            f"own data: {len(self.prompts):,} prompts ({', '.join(f'{n:,} {kind}' for kind, n in kinds.items())}) gave "
            f"{len(found):,} texts of {num_ids:,} ids, {num_cut:,} of them cut at {self.recipe.max_tokens}"
            f"{f' and {num_unfinished:,} by the time' if num_unfinished else ''}; left out: {left_out}"
        )

    def _usable_turns(
        self, turns: Sequence[OwnText], dropped: Counter[str]
    ) -> Iterator[tuple[OwnText, tuple[int, ...]]]:
        """Yield the user turns that pass the filters, with the prompts that ask them."""
        seen, grams = set[str](), set[tuple[str, ...]]()
        for text in turns:
            words = self.maker.user_turn(text.output, self.end_ids)
            reason = self._fault_of_turn(text, words, seen, grams)
            if words is None or reason is not None:
                dropped[f"user turns {reason}"] += 1
                continue
            seen.add(_plain_words(words))
            grams |= set(word_grams(words, NEAR_GRAM))
            yield text, tuple(self.maker.asked(words))

    def _fault_of_turn(
        self, text: OwnText, words: str | None, seen: set[str], grams: set[tuple[str, ...]]
    ) -> str | None:
        """Return why the user turn `words` is not answered, or None. `seen`, `grams`: of the turns before it."""
        if words is None:
            return "without an end"
        if not words:
            return "that are empty"
        if any(token in words for token in self.maker.tokenizer.all_special_tokens if token):
            return "with a special token"
        if len(self.maker.asked(words)) > self.recipe.longest:
            return "that are too long"
        if is_looping(text.output):
            return "that loop"
        if _plain_words(words) in seen:
            return "that are duplicates"
        own = set(word_grams(words, NEAR_GRAM))
        if len(own & grams) > NEAR_SHARE * len(own):
            return "that are near-duplicates"
        return "of an evaluation" if self._is_of_an_evaluation(words) else None

    def _fault(self, text: OwnText, seen: set[tuple[int, ...]]) -> str | None:
        """Return why an answer is not learnt from, or None."""
        if all(id in self.end_ids for id in text.output):
            return "that are empty"
        if is_looping(text.output):
            return "that loop"
        if text.output in seen:
            return "that are duplicates"
        words = str(self.maker.tokenizer.decode([*text.prompt, *text.output]))
        return "of an evaluation" if self._is_of_an_evaluation(words) else None

    def _is_of_an_evaluation(self, text: str) -> bool:
        return self._evaluation is not None and self._evaluation.is_shared_by(text)


def _plain_words(text: str) -> str:
    """Return the text in lower case with single spaces."""
    return " ".join(text.lower().split())
