"""Text to token ids and back, from the tokenizer metadata of a GGUF file.

Owns the vocabulary: the byte-level BPE model, special tokens, the ids that end a generation, the bytes of each
token. The merging itself is done by the `tokenizers` library. Knows nothing of weights, of the engine, or of how
text arrives piece by piece (see `detokenizer`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from itertools import repeat
from typing import NoReturn, TypeVar

from tokenizers import Tokenizer as MergeTokenizer
from tokenizers import models

from ropeway.errors import InvalidRequestError, ModelFileError, UnsupportedModelError
from ropeway.text.pre_tokenizers import PRE_TOKENIZERS, PreTokenizerSpec

T = TypeVar("T")


class TokenKind(IntEnum):
    """`tokenizer.ggml.token_type`, as the GGUF specification numbers it."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Texts of tokens that end a generation (a turn, a message or a document) in the model families that use them;
# files often name only one of theirs in the metadata. A token so named is a control token even where the file
# forgot to say so.
_END_TEXTS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "</s>",
    "<eos>",
    # What follows one of these in code models is padding or the next file or repository, never more of the answer.
    "<|fim_pad|>",
    "<fim-pad>",
    "<fim_pad>",
    "<PAD>",
    "[PAD]",
    "<|fim_repo|>",
    "<|repo_name|>",
    "<fim-repo>",
    "<REPO>",
    "<reponame>",
    "<|file_sep|>",
)
_END_ID_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")


class Tokenizer:
    """Byte-level BPE over the vocabulary of one model; immutable, usable from any thread."""

    def __init__(self, vocabulary: Vocabulary, spec: PreTokenizerSpec, merges: list[tuple[str, str]]) -> None:
        self._tokens = vocabulary.tokens
        self._kinds = vocabulary.kinds
        self._whole_texts: dict[int, str | None] = {}
        self._token_bytes: list[bytes | None] = [None] * len(
            self._tokens
        )  # filled on first use: a start needs few of them
        self.vocab_size = len(self._tokens)
        self.bos_token_id = vocabulary.bos_token_id
        self.eos_token_id = vocabulary.eos_token_id
        self.eos_token_ids = vocabulary.end_token_ids
        self.adds_bos = vocabulary.adds_bos
        normal = int(TokenKind.NORMAL)  # a plain number compares faster, and most tokens are normal
        marked = [(index, TokenKind(kind)) for index, kind in enumerate(self._kinds) if kind not in (normal, 0)]
        self.special_token_ids = frozenset(
            index for index, kind in marked if kind in (TokenKind.CONTROL, TokenKind.UNKNOWN)
        )
        user_defined = {self._tokens[index]: index for index, kind in marked if kind == TokenKind.USER_DEFINED}
        special = self._special_ids = {self._tokens[index]: index for index in self.special_token_ids}
        self._always_whole = _Splitter(user_defined)
        self._special_whole = _Splitter(user_defined | special)
        self._merge_tokenizer = _merge_tokenizer(self._tokens, spec, merges)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object]) -> Tokenizer:
        """The tokenizer that a GGUF file's metadata describes.

        Raises: ModelFileError for metadata that is missing, of the wrong type or contradicts itself;
            UnsupportedModelError for a
            tokenizer or pre-tokenizer that Ropeway does not have.
        """
        spec = _pre_tokenizer_spec(metadata)
        vocabulary = Vocabulary(metadata, adds_bos_default=spec.adds_bos)
        return cls(vocabulary, spec, _merges(metadata))

    def encode(self, text: str, *, add_bos: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of `text`.

        add_bos: begin with the BOS token, if the model wants one and the text does not begin with it already.
        parse_special: the text of a control token (`<|im_end|>`) becomes that token; False treats it as plain
            text, as text
            from strangers should be. User-defined tokens are always found.
        A byte that no token of the vocabulary holds is dropped, as in llama.cpp and in the model's training.

        Raises InvalidRequestError for text that is not valid Unicode.
        """
        _check_unicode(text)
        ids: list[int] = []
        splitter = self._special_whole if parse_special else self._always_whole
        for piece in splitter.split(text):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids += self._merge(piece)
        if add_bos and self.adds_bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)
        return ids

    def decode(self, token_ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of `token_ids`; bytes that are not UTF-8 become U+FFFD.

        skip_special: control tokens have no text.

        Raises InvalidRequestError for an id outside the vocabulary.
        """
        hidden = self.special_token_ids if skip_special else frozenset()
        pieces = [self.token_bytes(token_id) for token_id in token_ids if token_id not in hidden]
        return b"".join(pieces).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for: often not whole characters; empty for an unused id.

        Raises InvalidRequestError for an id outside the vocabulary.
        """
        if not 0 <= token_id < self.vocab_size:
            raise InvalidRequestError(f"token id {token_id} is outside the vocabulary of {self.vocab_size} tokens")
        known = self._token_bytes[token_id]
        if known is None:
            known = self._token_bytes[token_id] = _bytes_of(self._tokens[token_id], self._kinds[token_id])
        return known

    def whole_text(self, token_id: int) -> str | None:
        """The text of a token that is whole characters by itself; None for any other. Decoded once for all.

        Raises InvalidRequestError for an id outside the vocabulary.
        """
        if token_id not in self._whole_texts:
            try:
                self._whole_texts[token_id] = self.token_bytes(token_id).decode()
            except UnicodeDecodeError:
                self._whole_texts[token_id] = None
        return self._whole_texts[token_id]

    def special_id(self, text: str) -> int | None:
        """The control token of this text; None where there is none."""
        return self._special_ids.get(text)

    def token_text(self, token_id: int) -> str:
        """The token as the vocabulary spells it, in the byte-level alphabet for an ordinary one.

        Raises InvalidRequestError for an id outside the vocabulary.
        """
        if not 0 <= token_id < self.vocab_size:
            raise InvalidRequestError(f"token id {token_id} is outside the vocabulary of {self.vocab_size} tokens")
        return self._tokens[token_id]

    def _merge(self, text: str) -> list[int]:
        # The batch call, though for one text: it releases the interpreter lock and computes no offsets.
        (encoding,) = self._merge_tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return [token_id for token_id in ids if token_id != self.vocab_size] if self.vocab_size in ids else ids


class Vocabulary:
    """The tokens of a model and what the metadata says of them, checked.

    tokens: texts by token id, in the byte-level alphabet for ordinary tokens.
    kinds: of each token, with those that llama.cpp knows to be control tokens by their text put right.
    """

    def __init__(self, metadata: Mapping[str, object], *, adds_bos_default: bool) -> None:
        self.tokens = _strings(metadata, "tokens")
        id_of = dict(zip(self.tokens, range(len(self.tokens)), strict=True))
        _check_distinct(self.tokens, id_of)
        self.kinds = _kinds(metadata, len(self.tokens))
        self.bos_token_id = self._special_id(metadata, "bos")
        self.eos_token_id = self._special_id(metadata, "eos")
        named = [id_of[text] for text in _END_TEXTS if text in id_of]
        for token_id in named:
            self.kinds[token_id] = TokenKind.CONTROL
        listed = [self._special_id(metadata, name) for name in _END_ID_KEYS]
        self.end_token_ids = frozenset([*named, *(token_id for token_id in listed if token_id is not None)])
        if {
            "<|return|>",
            "<|call|>",
            "<|end|>",
        } <= id_of.keys():  # here <|end|> ends a message, and more messages follow
            self.end_token_ids -= {id_of["<|end|>"]}
        self.adds_bos = _value(metadata, "add_bos_token", bool, default=adds_bos_default)
        if self.adds_bos and self.bos_token_id is None:
            raise ModelFileError("tokenizer.ggml.add_bos_token is true, but tokenizer.ggml.bos_token_id is missing")

    def _special_id(self, metadata: Mapping[str, object], name: str) -> int | None:
        key = f"{name}_token_id"
        if f"tokenizer.ggml.{key}" not in metadata:
            return None
        token_id = _value(metadata, key, int)
        if not 0 <= token_id < len(self.tokens):
            raise ModelFileError(
                f"tokenizer.ggml.{key} is {token_id}, outside the vocabulary of {len(self.tokens)} tokens"
            )
        return token_id


class _Splitter:
    """Finds tokens that must stay whole; the leftmost first, of those that begin together the longest."""

    def __init__(self, id_of: Mapping[str, int]) -> None:
        self._id_of = {text: token_id for text, token_id in id_of.items() if text}
        longest_first = sorted(self._id_of, key=lambda text: (-len(text), text))
        self._pattern = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None

    def split(self, text: str) -> list[str | int]:
        """`text` in order: non-empty plain pieces, and the ids of the tokens found."""
        if self._pattern is None:
            return [text] if text else []
        pieces = self._pattern.split(text)  # plain, found, plain, found, … plain
        return [self._id_of[piece] if index % 2 else piece for index, piece in enumerate(pieces) if piece]


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        surrogate = ord(text[error.start])
        raise InvalidRequestError(
            f"the text is not valid Unicode: unpaired surrogate U+{surrogate:04X} at character {error.start}"
        ) from None


def _merge_tokenizer(tokens: Sequence[str], spec: PreTokenizerSpec, merges: list[tuple[str, str]]) -> MergeTokenizer:
    """The merging half. A byte that no token holds becomes the id after the last one, so that its neighbours do
    not merge.
    """
    id_of = dict(zip(tokens, range(len(tokens)), strict=True))
    id_of.pop("", None)
    missing = "\0missing"
    while missing in id_of:
        missing = f"\0{missing}"
    id_of[missing] = len(tokens)
    try:
        model = models.BPE(id_of, merges, unk_token=missing, fuse_unk=False, ignore_merges=spec.merges_are_skipped)
    except Exception as error:  # the library raises a bare Exception for a merge of tokens that do not exist
        raise ModelFileError(f"tokenizer.ggml.merges does not fit tokenizer.ggml.tokens: {error}") from error
    merge_tokenizer = MergeTokenizer(model)
    merge_tokenizer.pre_tokenizer = spec.build()
    return merge_tokenizer


def _pre_tokenizer_spec(metadata: Mapping[str, object]) -> PreTokenizerSpec:
    model = _value(metadata, "model", str)
    if model != "gpt2":
        raise UnsupportedModelError(
            f"tokenizer {model!r} (tokenizer.ggml.model) is not supported; supported: 'gpt2', which is byte-level BPE"
        )
    if "tokenizer.ggml.pre" not in metadata:
        raise UnsupportedModelError(
            "the file does not name its pre-tokenizer (tokenizer.ggml.pre), so its text cannot be split as in "
            "training; convert the model to GGUF again with a current converter"
        )
    name = _value(metadata, "pre", str)
    spec = PRE_TOKENIZERS.get(name)
    if spec is None:
        supported = ", ".join(sorted(PRE_TOKENIZERS))
        raise UnsupportedModelError(
            f"pre-tokenizer {name!r} (tokenizer.ggml.pre) is not supported; supported: {supported}"
        )
    return spec


def _merges(metadata: Mapping[str, object]) -> list[tuple[str, str]]:
    """The merge rules in order of rank.."""
    merges = _strings(metadata, "merges", may_be_empty=True)
    if not merges:
        return []
    joined = "\n".join(merges)
    halves = joined.replace(" ", "\n").split("\n")
    # Checked all at once, because one at a time takes longer than the rest of the loading in Python.
    one_space_each = set(map(str.count, merges, repeat(" "))) <= {1}
    if not one_space_each or len(halves) != 2 * len(merges) or "" in halves:
        _refuse_merge(merges)
    return list(zip(halves[::2], halves[1::2], strict=True))


def _refuse_merge(merges: Sequence[str]) -> NoReturn:
    for rank, merge in enumerate(merges):
        if merge.count(" ") != 1 or "\n" in merge or merge[0] == " " or merge[-1] == " ":
            raise ModelFileError(f"tokenizer.ggml.merges[{rank}] is {merge!r}, not two tokens separated by one space")
    raise AssertionError("no merge is malformed")


def _kinds(metadata: Mapping[str, object], num_tokens: int) -> list[int]:
    if "tokenizer.ggml.token_type" not in metadata:
        return [int(TokenKind.NORMAL)] * num_tokens
    kinds = _items(metadata, "token_type")
    if len(kinds) != num_tokens:
        raise ModelFileError(f"tokenizer.ggml.token_type has {len(kinds)} entries for {num_tokens} tokens")
    known = {int(kind) for kind in TokenKind} | {0}
    strange = set(kinds) - known
    if strange:
        raise ModelFileError(
            f"tokenizer.ggml.token_type holds {strange.pop()!r}, which the GGUF specification does not define"
        )
    return kinds


def _check_distinct(tokens: Sequence[str], id_of: Mapping[str, int]) -> None:
    if len(id_of) == len(tokens):
        return
    for token_id, text in enumerate(tokens):
        if text and id_of[text] != token_id:
            raise ModelFileError(
                f"tokenizer.ggml.tokens holds {text!r} twice, as ids {token_id} and {id_of[text]}; "
                "token texts must be distinct"
            )


def _strings(metadata: Mapping[str, object], key: str, *, may_be_empty: bool = False) -> list[str]:
    strings = _items(metadata, key)
    if set(map(type, strings)) - {str}:
        raise ModelFileError(f"tokenizer.ggml.{key} must be an array of strings")
    if not strings and not may_be_empty:
        raise ModelFileError(f"tokenizer.ggml.{key} is empty")
    return strings


def _items(metadata: Mapping[str, object], key: str) -> list:  # type: ignore[type-arg]
    """A metadata array as a list, whether the reader gave a list or a numpy array."""
    value = _raw(metadata, key)
    items = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(items, list):
        raise ModelFileError(f"tokenizer.ggml.{key} must be an array, not {type(value).__name__}")
    return items


def _value(metadata: Mapping[str, object], key: str, kind: type[T], *, default: T | None = None) -> T:
    if default is not None and f"tokenizer.ggml.{key}" not in metadata:
        return default
    value = _raw(metadata, key)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ModelFileError(f"tokenizer.ggml.{key} must be {kind.__name__}, not {type(value).__name__}")
    return value


def _raw(metadata: Mapping[str, object], key: str) -> object:
    try:
        return metadata[f"tokenizer.ggml.{key}"]
    except KeyError:
        raise ModelFileError(f"tokenizer.ggml.{key} is missing: the file holds no complete tokenizer") from None


def _byte_alphabet() -> dict[int, int]:
    """Code point in a byte-level token -> the byte it stands for: printable Latin-1 stands for itself, the rest,
    in order, for U+0100 onwards (GPT-2, Radford et al. 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    return {byte: byte for byte in printable} | {0x100 + index: byte for index, byte in enumerate(others)}


_BYTE_OF_CODE_POINT = _byte_alphabet()


def _bytes_of(text: str, kind: int) -> bytes:
    if kind == TokenKind.UNUSED:
        return b""
    if kind in (TokenKind.CONTROL, TokenKind.USER_DEFINED, TokenKind.UNKNOWN):
        return text.encode()
    try:
        return bytes([_BYTE_OF_CODE_POINT[ord(character)] for character in text])
    except KeyError:  # an added token that the converter listed as an ordinary one: it stands for its own text
        return text.encode()
