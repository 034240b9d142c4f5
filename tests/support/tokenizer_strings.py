"""The strings on which the tokenizer is compared with llama.cpp: seeded, the same on every machine. Standard
library only.

Used by the tests and by `benchmarks/tokenizer_oracle.py`, which stores what llama.cpp makes of them.
"""

from __future__ import annotations

import hashlib
import random
import zlib
from collections.abc import Callable, Sequence

import numpy as np

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<file_sep>", "<jupyter_code>")

_WORDS = """
the of and to in is it you that he was for on are with as I his they be at one have this from or had by hot but some
what there we can out other were all your when up use word how said an each she which do their time if will way about
many then them would write like so these her long make thing see him two has look more day could go come did my sound
no most number who over know water than call first people may down side been now find any new work part take get place
made live where after back little only round man year came show every good me give our under name very through just
form much great Throughput latency scheduling cableway tokenization internationalization Mississippi naïve façade
coöperate Zürich MixedCase camelCase snake_case SCREAMING_CASE kebab-case HTTPServer iPhone eBay e-mail U.S.A. Ph.D.
3rd 2nd x86_64
""".split()
_CONTRACTIONS = """
don't won't it's I'm they've we'll he'd she's DON'T It'S I'Ll you'RE 'tis 'twas rock'n'roll o'clock '90s s' 's 'S ''
""".split()
_PUNCTUATION = """
, . ; : ! ? - -- --- … " ' ( ) [ ] { } < > / \\ | @ # $ % ^ & * ~ ` _ + = « » “ ” ‘ ’ – — • · § ¶ † ° ′ ″ ≤ ≥ × ÷ ≠ ∞
€ £ ¥ ₹
""".split()
_SPACES = (
    *(" ", "  ", "   ", "    ", "\t", "\t\t", "\n", "\n\n", "\r\n", "\r", "\n ", " \n", "\n\t", "\v", "\f"),
    *("\u00a0", "\u2003", "\u3000", "\u2028", "\u0085", "\u200b", "\ufeff"),
)
_CODE = (
    "def f(x: int) -> int:\n    return x ** 2 + 1\n",
    "for (int i = 0; i < n; ++i) { sum += a[i] * b[i]; }",
    "#include <vector>\n\nint main() {\n\tstd::vector<int> v{1, 2, 3};\n\treturn v.size() == 3u ? 0 : 1;\n}\n",
    "SELECT name, COUNT(*) FROM riders WHERE age >= 18 GROUP BY name HAVING COUNT(*) > 3;",
    "const add = (a, b) => a + b; // arrow\n",
    '<div class="row">\n  <p>Hello&nbsp;world</p>\n</div>',
    'if x != y and not (a or b):\n        raise ValueError(f"{x!r} is not {y:>8.3f}")\n',
    'fn main() { let v: Vec<u8> = vec![0u8; 16]; println!("{:?}", &v[..4]); }',
    "\\begin{align} \\int_0^\\infty e^{-x^2}\\,dx &= \\frac{\\sqrt{\\pi}}{2} \\end{align}",
    "curl -s http://127.0.0.1:8000/v1/models | jq '.data[].id'",
    "    \n        \n    pass\n\n\n\nclass A(B):\n    x = 0xDEADBEEF\n",
    '{"key": [1, 2.5, -3e10, null, true], "nested": {"a\\n": "\\u00e9"}}',
)
_SCRIPTS = (
    "你好，世界！人工智能正在改变我们的生活方式。",
    "東京は日本の首都です。カタカナとひらがな、漢字。",
    "안녕하세요, 세계! 한국어 문장을 토큰으로 나눕니다.",
    "مرحبا بالعالم، كيف حالك اليوم؟ السَّلامُ عَلَيْكُمْ ١٢٣٤",
    "שלום עולם, מה שלומך היום? בְּרֵאשִׁית",
    "नमस्ते दुनिया, आप कैसे हैं? क्षत्रिय ज्ञान १२३",
    "বাংলা ভাষা সুন্দর। কিছু সংখ্যা ১২৩৪।",
    "தமிழ் மொழி மிகவும் பழமையானது.",
    "สวัสดีชาวโลก วันนี้อากาศดีมาก ๑๒๓",
    "Привет, мир! Съешь ещё этих мягких французских булок.",
    "Γειά σου Κόσμε, τι κάνεις σήμερα; ΑΒΓΔ",
    "Xin chào thế giới, hôm nay trời đẹp quá. Ắ Ằ Ẳ Ẵ Ặ",
    "გამარჯობა მსოფლიო Բարեւ աշխարհ ሰላም ልዑል",
    "e\u0301 a\u0308 n\u0303 o\u0302\u0301 Z\u0351\u036b\u0343\u036aa\u0300\u0301\u0302l\u0321\u0322g\u0328o",
    "ſtraße ﬁn ﬂow ǅ Ⅷ ½ ² ³ ① ㊿ ௧ 𝟘𝟙𝟚 𝐀𝐁𝐂 𝕏 ℵ ª º",
)
_EMOJI = ("😀", "🎉", "👍🏽", "👨‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪🇫🇷", "❤️", "☃", "🧑🏿‍🚀", "1️⃣", "🫠", "🪿", "🤷🏻‍♀️", "✈️", "©", "™")
_RANGES = (  # code points, first and last; with holes, private use and planes that few fonts have
    (0x20, 0x7E), (0x00, 0x1F), (0x7F, 0x9F), (0xA0, 0x17F), (0x180, 0x24F), (0x250, 0x2FF), (0x300, 0x36F),
    (0x370, 0x52F), (0x590, 0x6FF), (0x900, 0x97F), (0x0E00, 0x0E7F), (0x1100, 0x11FF), (0x1E00, 0x1FFF), (0x2000,
    0x206F), (0x2070, 0x218F), (0x2190, 0x23FF), (0x2460, 0x27BF), (0x3000, 0x30FF), (0x4E00, 0x9FFF), (0xAC00,
    0xD7A3), (0xE000, 0xE0FF), (0xFB00, 0xFDFF), (0xFE00, 0xFFFF), (0x10000, 0x1047F), (0x1D400, 0x1D7FF),
    (0x1F000, 0x1FAFF), (0x20000, 0x2A6DF), (0xE0000, 0xE01EF),
)  # fmt: skip


class _Source:
    """Draws from `random.Random.random` alone, the one method whose sequence Python promises to keep."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random

    def below(self, limit: int) -> int:
        return int(self._random() * limit)

    def one(self, items: Sequence[str]) -> str:
        return items[self.below(len(items))]

    def some(self, least: int, most: int, make: Callable[[], str], separator: str = "") -> str:
        return separator.join(make() for _ in range(least + self.below(most - least + 1)))


def tokenizer_strings(num_strings: int = 2400, *, seed: int = 20250) -> list[str]:
    """`num_strings` distinct strings, every kind in turn; a longer list begins with the shorter one."""
    source = _Source(seed)
    kinds = _kinds(source)
    strings: dict[str, None] = {}
    turn = 0
    while len(strings) < num_strings:
        strings[kinds[turn % len(kinds)]()] = None
        turn += 1
    return list(strings)


def digest(strings: Sequence[str]) -> str:
    """SHA-256 of the strings, to notice that they are not those a golden was made from."""
    return hashlib.sha256("\0\0".join(strings).encode()).hexdigest()


def _kinds(source: _Source) -> list[Callable[[], str]]:
    def word() -> str:
        return source.one(_WORDS)

    def digit() -> str:
        return source.one("0123456789")

    def space() -> str:
        return source.one(_SPACES)

    def script() -> str:
        text = source.one(_SCRIPTS)
        start = source.below(len(text) - 1)
        return text[start : start + 2 + source.below(20)]

    def character() -> str:
        first, last = _RANGES[source.below(len(_RANGES))]
        return chr(first + source.below(last - first + 1))

    def anything() -> str:
        makers = (word, word, digit, space, script, character, lambda: source.one(_PUNCTUATION))
        return makers[source.below(len(makers))]()

    def code() -> str:
        text = source.one(_CODE)
        start = source.below(len(text) // 2)
        return text[start : start + 10 + source.below(60)]

    return [
        lambda: source.some(3, 24, word, " ") + source.one(".?!"),
        lambda: source.some(1, 12, lambda: word() + source.one(_PUNCTUATION) + source.one(("", " ", " ", "  "))),
        code,
        lambda: source.some(1, 24, digit),
        lambda: source.some(
            1, 6, lambda: source.some(1, 7, digit) + source.one((".", ",", " ", "-", "/", "e", "%", " $"))
        ),
        lambda: source.some(1, 8, space),
        lambda: source.some(1, 6, lambda: word() + source.some(1, 4, space)),
        lambda: " " * source.below(40) + word() + " " * source.below(40) + "\n" * source.below(6),
        lambda: source.some(1, 8, lambda: source.one(_CONTRACTIONS), source.one((" ", "", "\n"))),
        lambda: source.some(1, 4, script, source.one(("", " "))),
        lambda: source.some(1, 8, lambda: source.one(_EMOJI), source.one(("", " "))),
        lambda: source.some(1, 12, character),
        lambda: source.some(1, 6, lambda: source.one(SPECIAL_TOKENS) + source.one(("", " ", "\n", "user\n", "é"))),
        lambda: source.some(
            1, 5, lambda: source.one(SPECIAL_TOKENS)[: -1 - source.below(4)] + source.one(SPECIAL_TOKENS)
        ),
        lambda: source.some(20, 80, lambda: word()[:5]),
        lambda: source.some(1, 40, lambda: source.one("aeiou\u00e9 \u0001")),
        lambda: source.some(2, 20, anything),
        lambda: source.some(1, 12, lambda: source.one(_PUNCTUATION), source.one(("", " "))),
        lambda: source.some(
            1, 6, lambda: word().upper() + source.one(("'S", "'t", "’s", "'LL", "'")) + source.one(("", " "))
        ),
        lambda: source.one("ab 1\n\t!\u3042\u0301") * (1 + source.below(120)),
    ]


def boundary_blind_metadata(pre: str, merges: Sequence[str], whole_words: Sequence[str]) -> dict[str, object]:
    """Tokenizer metadata with the pre-tokenizer `pre`: the 256 bytes, what the merges make, and whole words."""
    alphabet = [chr(code) for code in [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x144)]]
    merged = dict.fromkeys(merge.replace(" ", "") for merge in merges)
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, *merged, *whole_words]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([3] * 3 + [1] * (len(tokens) - 3), np.int32),
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def ids_checksum(ids: Sequence[int]) -> str:
    """CRC-32 of the ids, as eight hexadecimal digits."""
    return f"{zlib.crc32(np.array(ids, '<i4').tobytes()):08x}"
