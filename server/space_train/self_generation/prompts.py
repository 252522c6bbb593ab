"""Prompts without a data set, for the model to continue: the beginning of a user's turn, requests on topics of our own,
signatures and docstrings of installed Python packages, and the beginning of any text."""

from __future__ import annotations

import ast
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import count as count_from
from itertools import islice
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from space_train.data.corpus import DROPPED_FOLDERS, parsed, reason_to_drop
from space_train.data.examples import ChatText, own_prefix
from space_train.data.records import ConversationTurn, Role, UnusableTemplate
from space_train.self_generation.self_generate import NUM_SEEDS, TEMPERATURES, Question
from space_train.train_plan import OwnTextError


class PromptSource(StrEnum):
    """Where a prompt comes from."""

    USER = "user turns"  # the model writes the user's turn as well
    TOPIC = "topics"
    CODE = "code"
    TEXT = "texts"
    START = "starts"  # the beginning of a text alone


CHAT_SHARES = {PromptSource.USER: 0.5, PromptSource.TOPIC: 0.2, PromptSource.CODE: 0.2, PromptSource.TEXT: 0.1}
"""Shares of the prompts of a model with a chat template."""
PLAIN_SHARES = {PromptSource.CODE: 0.4, PromptSource.TEXT: 0.3, PromptSource.START: 0.3}
"""Shares of the prompts of a model without one."""

USER_TEMPERATURES = (0.8, 1.0)  # of user turns, in turn: below, they repeat each other; above, they make no sense
START_TEMPERATURE = 1.0  # a greedy text from its start alone would be one text

LONGEST_PROMPT = 256  # ids
TEXT_IDS = 48  # ids of a text that the model goes on with


@dataclass(frozen=True)
class OwnPrompt:
    """A prompt, and how the model continues it."""

    source: PromptSource
    ids: tuple[int, ...]
    temperature: float
    seed: int

    @property
    def question(self) -> Question:
        return self.ids, self.temperature, self.seed


class PromptMaker:
    """Makes prompts for one tokenizer. `chat`: None for a model without a chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat: ChatText | None) -> None:
        self.tokenizer, self.chat = tokenizer, chat
        self.prefix = own_prefix(tokenizer)
        self.user_header, self.user_end = (None, "") if chat is None else _around_a_user_turn(chat)

    def prompts(self, count: int, *, longest: int, seed: int, folders: Sequence[Path] = ()) -> list[OwnPrompt]:
        """Return `count` prompts of at most `longest` ids, the same for the same `seed` and packages. `folders`: of
        Python packages; none: the installed ones. Raises OwnTextError if no prompt is that short."""
        rng = np.random.default_rng(seed)
        longest = min(longest, LONGEST_PROMPT)
        shares = dict(PLAIN_SHARES if self.chat is None else CHAT_SHARES)
        if self.chat is not None and self.user_header is None:
            shares[PromptSource.TOPIC] += shares.pop(PromptSource.USER)
        snippets = installed_snippets(rng, folders or installed_folders())
        found: list[tuple[PromptSource, list[int]]] = []
        wanted = {source: round(share * count) for source, share in shares.items()}
        for source in (PromptSource.CODE, PromptSource.TEXT):
            of_source = (self._of_snippet(source, text, number) for number, text in enumerate(snippets[source]))
            short = (ids for ids in of_source if len(ids) <= longest)
            found += [(source, ids) for ids in islice(short, wanted[source])]
        if self.chat is None:
            found += [(PromptSource.START, self.start())] * (count - len(found))
        else:
            requests = (self.asked(text) for text in topic_requests(rng))
            short = (ids for ids in requests if len(ids) <= longest)
            topics = list(islice(short, wanted[PromptSource.TOPIC]))
            found += [(PromptSource.TOPIC, ids) for ids in topics]
            if self.user_header is not None and len(self.user_header) <= longest:
                found += [(PromptSource.USER, self.user_header)] * (count - len(found))
        if not found:
            raise OwnTextError(f"No prompt of its own has at most {longest} ids: give a longer --length.")
        numbers = {source: count_from(0) for source in PromptSource}
        return [_prompt(source, ids, next(numbers[source]), seed) for source, ids in found]

    def asked(self, request: str) -> list[int]:
        """Return the ids of a conversation in which the user asks `request` and the model is to answer."""
        if self.chat is None:
            raise ValueError("a model without a chat template is asked nothing")
        text = self.chat.render([ConversationTurn(Role.USER, request, learned=False)], asking=True)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def user_turn(self, output: Sequence[int], end_ids: frozenset[int]) -> str | None:
        """Return the words of a user's turn that the model has written, or None if it did not end."""
        end = next((place for place, id in enumerate(output) if id in end_ids), None)
        words = self.tokenizer.decode(output[:end], skip_special_tokens=False)
        words, marker, _ = str(words).partition(self.user_end)
        return None if end is None and not marker else words.strip()

    def start(self) -> list[int]:
        """Return the ids that a text begins with: the tokenizer's own, else an end of text."""
        ids = self.prefix or [id for id in (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id) if id is not None]
        return list(ids[:1] if not self.prefix else ids)

    def _of_snippet(self, source: PromptSource, text: str, number: int) -> list[int]:
        """Return the prompt of a snippet: three of four are asked for in words, if there is a chat template."""
        requests = CODE_REQUESTS if source is PromptSource.CODE else TEXT_REQUESTS
        if self.chat is not None and number % (len(requests) + 1) < len(requests):
            return self.asked(requests[number % (len(requests) + 1)].format(text.strip()))
        ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return [*self.prefix, *(ids if source is PromptSource.CODE else ids[:TEXT_IDS])]


def _prompt(source: PromptSource, ids: Sequence[int], number: int, seed: int) -> OwnPrompt:
    """Return prompt `number` of its source. It does not depend on how many there are, so that a run of fewer or more
    texts finds those that are written."""
    temperatures = {PromptSource.USER: USER_TEMPERATURES, PromptSource.START: (START_TEMPERATURE,)}
    of_source = temperatures.get(source, TEMPERATURES)
    own_seed = (seed << 32) + (list(PromptSource).index(source) << 28) + number
    return OwnPrompt(source, tuple(ids), of_source[number % len(of_source)], own_seed % NUM_SEEDS)


SENTINEL = "\ue000"  # stands for a user's words; of the private use area, so that no template changes it


def _around_a_user_turn(chat: ChatText) -> tuple[list[int] | None, str]:
    """Return the ids before a user's words in a rendered chat, and the first word behind them; None where the template
    does not show them."""
    try:
        text = chat.render([ConversationTurn(Role.USER, SENTINEL, learned=False)], asking=True)
    except UnusableTemplate:
        return None, ""
    before, found, behind = text.partition(SENTINEL)
    if not found or not before or not behind.strip():
        return None, ""
    return list(chat.tokenizer(before, add_special_tokens=False)["input_ids"]), behind.split()[0]


CODE_REQUESTS = (
    "Complete this Python function:\n\n```python\n{}\n```",
    "Write the body of the following function. Reply with code only.\n\n{}",
    "Implement this function, and explain in two sentences how it works.\n\n```python\n{}\n```",
)
TEXT_REQUESTS = (
    "Summarize the following text in one or two sentences:\n\n{}",
    "Explain this in simple words:\n\n{}",
    "Rewrite the following text so that it is shorter and friendlier:\n\n{}",
)

REQUESTS = (
    "Explain {} to a beginner.",
    "Write a short story about {}.",
    "What are the most common mistakes in {}?",
    "Give me ten ideas for {}.",
    "Write an email to a colleague about {}.",
    "I have one weekend for {}. What now?",
    "Compare two different approaches to {} in a table.",
    "Write a step-by-step guide to {}.",
    "What questions should I ask an expert about {}?",
    "Write a poem about {}.",
    "Make a weekly plan for {}.",
    "What is the history of {}?",
    "Be a teacher and quiz me on {}.",
    "List the advantages and disadvantages of {}.",
    "Write a dialogue between two friends about {}.",
    "Explain {} to a child of six.",
    "Write a product description to do with {}.",
    "How has technology changed {}?",
    "Write a Python program about {}.",
    "Suggest books, films or songs about {}.",
    "What does {} cost? How can I save?",
    "Write a news report about {}.",
    "Is {} worth the effort? Argue for and against.",
    "Define the ten most important words of {}.",
)
_TOPICS = """
growing vegetables, keeping bees, the water cycle, sorting a list, first aid, learning the piano, black holes, baking
bread, budgeting for students, public speaking, photosynthesis, building a website, the Roman Empire, probability,
training for a marathon, house plants, negotiating a salary, plate tectonics, chess openings, writing a novel, electric
cars, vaccines, remote work, medieval castles, watercolour painting, recursion, camping with children, the stock market,
sleep, learning a language, databases, volcanoes, knitting, job interviews, coral reefs, the French Revolution,
meditation, robots, composting, fractions, travel by train, photography at night, music theory, cooking for many guests,
computer networks, birdwatching, insurance, ancient Egypt, bicycle repair, climate and weather, moving to another city,
encryption, jazz, the human heart, woodworking, unit tests, raising a puppy, moral dilemmas, the solar system, tea,
linear equations, time management, a small bakery, board games, tides, customer service, bridges, film editing,
spreadsheets, the immune system, city planning, folk tales, a birthday party, renewable energy, regular expressions,
swimming, museums, honey, conflicts at work, geometry
"""
TOPICS = tuple(topic.replace("\n", " ") for topic in re.split(r",\s+", _TOPICS.strip()))


def topic_requests(rng: np.random.Generator) -> Iterator[str]:
    """Yield every request on every topic once, in random order."""
    for number in rng.permutation(len(REQUESTS) * len(TOPICS)).tolist():
        yield REQUESTS[number // len(TOPICS)].format(TOPICS[number % len(TOPICS)])


def installed_folders() -> list[Path]:
    """Return the folders of the standard library and of the installed packages."""
    return list(dict.fromkeys(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")))


FILES_OF_A_PACKAGE, SNIPPETS_OF_A_FILE = 24, 3  # at most
FEWEST_CHARACTERS, MOST_CHARACTERS = 60, 1200  # of a snippet


def installed_snippets(rng: np.random.Generator, folders: Sequence[Path]) -> dict[PromptSource, Iterator[str]]:
    """Return signatures with their docstrings, and documentation, of Python files, in random order. Each package gives
    a file in turn, so that large ones do not outweigh the others; a snippet is given once."""
    roots = [root for folder in folders for root in sorted(folder.iterdir()) if _is_package(root)]
    orders = {source: rng.permutation(len(roots)).tolist() for source in (PromptSource.CODE, PromptSource.TEXT)}
    seeds = {source: int(rng.integers(2**32)) for source in orders}
    return {source: _snippets(source, [roots[n] for n in order], seeds[source]) for source, order in orders.items()}


def _snippets(source: PromptSource, roots: Sequence[Path], seed: int) -> Iterator[str]:
    rng, seen = np.random.default_rng(seed), set[str]()
    files: dict[Path, list[Path]] = {}
    for turn in range(FILES_OF_A_PACKAGE):
        for root in roots:
            if root not in files:
                files[root] = _python_files(root, rng)
            for file in files[root][turn : turn + 1]:
                for snippet in islice(_snippets_of(source, file, root), SNIPPETS_OF_A_FILE):
                    if snippet not in seen:
                        seen.add(snippet)
                        yield snippet


def _is_package(root: Path) -> bool:
    if root.name.startswith(("_", ".")) or root.name in DROPPED_FOLDERS:
        return False
    return root.suffix == ".py" if root.is_file() else (root / "__init__.py").is_file()


def _python_files(root: Path, rng: np.random.Generator) -> list[Path]:
    """Return some files of a package, in random order."""
    if root.is_file():
        return [root]
    files = sorted(path for path in root.rglob("*.py") if not DROPPED_FOLDERS & set(path.relative_to(root).parts))
    return [files[number] for number in rng.permutation(len(files))[:FILES_OF_A_PACKAGE].tolist()]


def _snippets_of(source: PromptSource, file: Path, root: Path) -> Iterator[str]:
    try:
        content = file.read_bytes()
    except OSError:
        return
    if reason_to_drop(str(file.relative_to(root.parent)), content) is not None:
        return
    text = content.decode("utf-8").replace("\r\n", "\n")
    if (tree := parsed(text)) is None:
        return
    found = signatures(text, tree) if source is PromptSource.CODE else documentation(tree)
    yield from (snippet for snippet in found if FEWEST_CHARACTERS <= len(snippet) <= MOST_CHARACTERS)


def signatures(text: str, tree: ast.Module) -> Iterator[str]:
    """Yield each documented top-level function up to the end of its docstring."""
    lines = text.split("\n")
    for node in tree.body:
        is_test = isinstance(node, ast.FunctionDef) and node.name.startswith("test")
        if isinstance(node, ast.FunctionDef) and not is_test and ast.get_docstring(node) and len(node.body) > 1:
            yield "\n".join(lines[node.lineno - 1 : node.body[0].end_lineno]) + "\n"


def documentation(tree: ast.Module) -> Iterator[str]:
    """Yield the docstrings of a module and its classes that are prose of several sentences."""
    for node in (tree, *tree.body):
        if isinstance(node, ast.Module | ast.ClassDef):
            paragraphs = (ast.get_docstring(node) or "").split("\n\n")
            prose = [part for part in paragraphs if re.match(r"[A-Z].*[.:]$", part, re.DOTALL) and ">>>" not in part]
            if sum(part.count(". ") + 1 for part in prose) > 1:
                yield "\n\n".join(prose)
