"""Lines that tokenizers disagree on: sources and documents of installed packages, and generated text, by a seed."""

import itertools
import random
import sys
import sysconfig
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path

SENTENCES = (
    "The quick brown fox jumps over the lazy dog, doesn't it? I'll say: we've been there, you're right, I'm sure.",
    "IT'S 'TWAS DON'T we'Ve I'LL he'D o'clock 'sun 'tree 'red 'ma rock'n'roll it’s don’t",
    "Die Größe der Übungsräume ändert sich täglich; Straßenbahnfahrer grüßen höflich.",
    "Où est passé l'élève qui mangeait des crêpes à Noël ? Ça alors, ÉCOLE et œuvre d'Île-de-France !",
    "El niño comió piñas en la montaña; ¿qué pasó después? ¡Nada!",
    "Съешь же ещё этих мягких французских булок, да выпей чаю. ПРИВЕТ Мир",
    "Ξεσκεπάζω τὴν ψυχοφθόρα βδελυγμία. ΑΒΓ αβγ Ὀδυσσεύς",
    "いろはにほへと ちりぬるを。カタカナとひらがな、漢字２０２６年１１月。",
    "天地玄黃，宇宙洪荒。日月盈昃，辰宿列張。我有3个苹果和12.5元。",
    "키스의 고유조건은 입술끼리 만나야 하고 특별한 기술은 필요치 않다.",
    "صِف خَلقَ خَودِ كَمِثلِ الشَمسِ إِذ بَزَغَت ٠١٢٣٤٥٦٧٨٩، ؟",
    "דג סקרן שט בים מאוכזב ולפתע מצא חברה. שָׁלוֹם",
    "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण का सर्वनाश। १२३४५ नमस्ते",
    "বাংলা ভাষায় লেখা একটি বাক্য। তুমি কেমন আছো? ১২৩",
    "நான் தமிழ் பேசுகிறேன். வணக்கம்! తెలుగు భాష ಕನ್ನಡ മലയാളം",
    "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า กว่าบรรดาฝูงสัตว์ ๑๒๓",
    "ພາສາລາວ ភាសាខ្មែរ မြန်မာဘာသာ བོད་སྐད།",
    "Ђачко нјо Ǆ ǅ ǆ ŉ ﬁ ﬂ ﬆ ſt 'ſ K Å İstanbul ıI ẞß",
    "Հայերեն ქართული ენა አማርኛ ᏣᎳᎩ ᠮᠣᠩᠭᠣᠯ ⴰⵎⴰⵣⵉⵖ",
    "Việt Nam: Những đêm dài Việt Nam (nfd)",
)
EMOJI = ("😀", "🤖", "👩‍👩‍👧‍👦", "👍🏽", "🇩🇪", "🇺🇸🇯🇵", "❤️", "☺", "🏴󠁧󠁢󠁳󠁣󠁴󠁿", "1️⃣", "🫠", "🧑🏿‍🚀", "⚙︎", "🦾✨", "👁️‍🗨️")
SPACES = " \t\n\r\v\f\x1c\x1f\x85\xa0\u1680\u2000\u2003\u2009\u200a\u200b\u2028\u2029\u202f\u205f\u3000\ufeff"
LOOKALIKES = (
    "<|im_end|>", "<|im_start|>user\n", "<|endoftext|>", "<bos>", "<eos>", "</s>", "<s>", "<unk>", "<pad>", "<0x0A>",
    "<0xF0>", "[INST]", "<start_of_turn>", "<end_of_turn>", "<unused7>", "<unused99>", "[multimodal]", "<table>",
    "</td>",
    "<h1>", "<filename>", "▁", "▁▁", "▁the", "Ġ", "ĠĠthe", "Ċ", "\ufffd", "<|", "|>", "<|im_", "_end|>", "<start_of",
)  # fmt: skip
UNITS = (
    "a", "ab", "aab", "=", "-", "_", "#", "0", "10", " ", "\n", "\t", "\n ", "ha", "na ", "аб", "的", "!?", "...", "'s",
    "\u0301", "🙂", "\\", "▁", "xX", "__", "//", "*-",
)  # fmt: skip
SUFFIXES = {".py", ".pyi", ".md", ".rst", ".txt", ".json", ".toml", ".c", ".h", ".js", ".css", ".html", ".sh"}


def lines(count: int, seed: int = 0) -> list[str]:
    """`count` different texts, most of one line; the same for the same seed and the same installed packages."""
    generator = random.Random(seed)
    makers: list[tuple[int, Callable[[random.Random], str]]] = [
        (4, next_of(package_lines(generator))), (1, _spaced), (1, _scripts), (1, _marks), (1, _numbers), (1, _emoji),
        (1, _mojibake), (1, _runs), (1, _code_points), (1, _mixed), (1, _cases), (1, _look_alike),
    ]  # fmt: skip
    weights = [weight for weight, _ in makers]
    found: dict[str, None] = dict.fromkeys(SENTENCES)
    while len(found) < count:
        (_, make), = generator.choices(makers, weights)  # fmt: skip
        text = make(generator)
        if text:
            found[text] = None
    return list(found)[:count]


def next_of(source: Iterator[str]) -> Callable[[random.Random], str]:
    return lambda _: next(source)


def package_lines(generator: random.Random) -> Iterator[str]:
    """One to six neighbouring lines of a source or document of the standard library or an installed package."""
    roots = [Path(sysconfig.get_paths()["stdlib"]), *(Path(one) for one in sys.path if one.endswith("site-packages"))]
    files = sorted(file for root in roots for file in root.rglob("*") if file.suffix in SUFFIXES)
    while True:
        file = generator.choice(files)
        try:
            content = file.read_text(encoding="utf-8").splitlines(keepends=True)
        except (OSError, UnicodeDecodeError):
            continue
        if not content:
            continue
        start = generator.randrange(len(content))
        yield "".join(content[start : start + generator.choice((1, 1, 1, 2, 6))])[:2000]


def _words(generator: random.Random, number: int) -> list[str]:
    return generator.choices(" ".join(SENTENCES).split(), k=number)


def _spaced(generator: random.Random) -> str:
    """Words with odd white space between them, and runs of it."""
    alphabet = generator.choice((" ", " \n", " \t", "\n", "\r\n", SPACES, SPACES))

    def run() -> str:
        return "".join(generator.choices(alphabet, k=generator.choice((0, 1, 1, 2, 3, 4, 7, 16, 31, 33, 70))))

    return run() + "".join(word + run() for word in _words(generator, generator.randint(1, 8)))


def _scripts(generator: random.Random) -> str:
    """Letters of one or two blocks of the Basic Multilingual Plane or the one above."""
    words = []
    for _ in range(generator.randint(1, 3)):
        block = (
            generator.choice((*range(0x0, 0xD7, 1), *range(0xF9, 0x100), *range(0x100, 0x1F0), 0x200, 0x2A0, 0x300))
            * 256
        )
        for _ in range(generator.randint(1, 4)):
            points = [block + generator.randrange(256) for _ in range(generator.randint(1, 9))]
            words.append(
                "".join(chr(point) for point in points if unicodedata.category(chr(point)) not in ("Cn", "Cs"))
            )
    return " ".join(words)


def _marks(generator: random.Random) -> str:
    """Base letters under combining marks, composed and decomposed."""
    marks = [*range(0x300, 0x370), 0x5B0, 0x64E, 0x93F, 0x94D, 0xE31, 0x1AB0, 0x1DC0, 0x20D0, 0x20E3, 0xFE0F, 0xFE20]
    text = ""
    for _ in range(generator.randint(1, 12)):
        text += generator.choice("aeoun AZ1.'-ßकئกя한") + "".join(
            chr(generator.choice(marks)) for _ in range(generator.randrange(4))
        )
    return unicodedata.normalize(
        generator.choice(("NFC", "NFD", "NFKC", "NFKD")), text + generator.choice(SENTENCES)[:40]
    )


def _numbers(generator: random.Random) -> str:
    zeros = (0x30, 0x30, 0x30, 0x660, 0x966, 0xE50, 0xFF10, 0x1D7CE, 0x2460, 0x2160)
    pieces = []
    for _ in range(generator.randint(1, 6)):
        zero = generator.choice(zeros)
        pieces.append(
            "".join(chr(zero + generator.randrange(10)) for _ in range(generator.choice((1, 2, 3, 4, 5, 6, 7, 12, 40))))
        )
        pieces.append(generator.choice((" ", ",", ".", "-", "e", "x", "½", "²", "", "\n", "%", " $", "年")))
    return "".join(pieces)


def _emoji(generator: random.Random) -> str:
    pieces = [
        generator.choice((*EMOJI, *EMOJI, *_words(generator, 2), " ", "  ", "\u200d", "\ufe0f")) for _ in range(8)
    ]
    return "".join(pieces)


def _mojibake(generator: random.Random) -> str:
    """What UTF-8 becomes when it is cut in the middle of a character or read as something else."""
    content = generator.choice(SENTENCES).encode()
    start = generator.randrange(len(content))
    piece = content[start : start + generator.randint(1, 60)]
    kind = generator.randrange(3)
    if kind == 0:
        return piece.decode("latin-1")
    if kind == 1:
        return piece.decode("cp1252", "replace")
    return piece.decode("utf-8", "replace")


def _runs(generator: random.Random) -> str:
    """Long repetitions, where it matters which of two equal merges comes first."""
    unit = generator.choice(UNITS)
    text = unit * generator.choice((2, 3, 5, 8, 17, 32, 33, 64, 100))
    return generator.choice(("", "a", " ", "\n")) + text + generator.choice(("", "b", " ", "\n"))


def _code_points(generator: random.Random) -> str:
    """Any code points but halves of surrogate pairs: unassigned and private ones, controls, planes up to the last."""
    limits = (0x100, 0x3000, 0x10000, 0x20000, 0x110000)
    points = [generator.randrange(generator.choice(limits)) for _ in range(generator.randint(1, 12))]
    return "".join(chr(point) for point in points if not 0xD800 <= point < 0xE000)


def _mixed(generator: random.Random) -> str:
    pieces = itertools.chain(
        _words(generator, 4), generator.choices(EMOJI, k=1), generator.choices("(){}[];:,.!?@#$%^&*+=~`|\\/<>\"'", k=6)
    )
    shuffled = list(pieces)
    generator.shuffle(shuffled)
    return generator.choice(("", " ", "  ")).join(shuffled)


def _cases(generator: random.Random) -> str:
    """Words whose letters change case, with contractions behind them."""
    words = []
    for word in _words(generator, generator.randint(1, 5)):
        cased = "".join(generator.choice((letter.upper(), letter.lower(), letter.title())) for letter in word)
        words.append(cased + generator.choice(("", "'s", "'S", "'Re", "'LL", "'ve", "'D", "'m", "’s", "'x", "'")))
    return generator.choice((" ", "", "_", "-", "\n")).join(words)


def _look_alike(generator: random.Random) -> str:
    pieces = [generator.choice((*LOOKALIKES, *_words(generator, 3), " ", "\n")) for _ in range(generator.randint(1, 6))]
    return "".join(pieces)
