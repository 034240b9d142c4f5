"""What a benchmark asks for: prompts, output lengths, arrival times. Knows nothing of HTTP, servers or models.

Everything is drawn from one seed, so the same seed gives every server the same requests in the same order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson

from ropeway.errors import ConfigError


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request: the prompt as token ids or text, and the number of output tokens asked for."""

    prompt: tuple[int, ...] | str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Token counts drawn from a lognormal with the given arithmetic mean, rounded and clipped to 1..maximum.

    `sigma` is the standard deviation of the logarithm; 0 makes every length the mean. Clipping lowers the mean of what
    is drawn a little (ragged prompts: 128 becomes about 123).
    """

    mean: float
    sigma: float
    maximum: int

    def __post_init__(self) -> None:
        if not 1 <= self.mean <= self.maximum:
            raise ConfigError(
                f"a mean length of {self.mean:g} tokens is outside 1..{self.maximum}: change one of the two"
            )
        if not 0 <= self.sigma < math.inf:
            raise ConfigError(f"a length sigma of {self.sigma} is not a finite number >= 0")

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        """`count` lengths in tokens."""
        location = math.log(self.mean) - self.sigma**2 / 2
        lengths = np.rint(rng.lognormal(location, self.sigma, count))
        return [int(length) for length in np.clip(lengths, 1, self.maximum)]


RAGGED_PROMPTS = LengthDistribution(mean=128, sigma=0.8, maximum=512)
RAGGED_OUTPUTS = LengthDistribution(mean=64, sigma=0.9, maximum=256)


@dataclass(frozen=True, slots=True)
class SyntheticWorkload:
    """Random prompts of ragged lengths: uniform token ids in first_token_id..vocab_size-1.

    The first ids of most vocabularies are control tokens, hence the offset.
    """

    prompt_lengths: LengthDistribution = RAGGED_PROMPTS
    output_lengths: LengthDistribution = RAGGED_OUTPUTS
    vocab_size: int = 32000
    first_token_id: int = 100

    def __post_init__(self) -> None:
        if not 0 <= self.first_token_id < self.vocab_size:
            raise ConfigError(
                f"the first token id, {self.first_token_id}, is not inside a vocabulary of {self.vocab_size}: lower it"
            )

    def requests(self, count: int, seed: int) -> list[BenchRequest]:
        """`count` requests. Lengths have random streams of their own, so a longer run begins like a shorter one."""
        prompt_rng, output_rng, token_rng = (np.random.default_rng((seed, stream)) for stream in range(3))
        prompt_lengths = self.prompt_lengths.draw(prompt_rng, count)
        output_lengths = self.output_lengths.draw(output_rng, count)
        return [
            BenchRequest(
                tuple(token_rng.integers(self.first_token_id, self.vocab_size, prompt_length).tolist()), output_length
            )
            for prompt_length, output_length in zip(prompt_lengths, output_lengths, strict=True)
        ]


def default_num_requests(concurrency: int) -> int:
    """Enough requests that ramp-up and drain do not rule: max(48, 8·c) up to c=32, max(256, 4·c) above."""
    return max(48, 8 * concurrency) if concurrency <= 32 else max(256, 4 * concurrency)


def poisson_arrivals_s(rate: float, count: int, seed: int) -> list[float]:
    """`count` arrival times in seconds: a Poisson process of `rate` requests per second, the first at 0."""
    if not 0 < rate < math.inf:
        raise ConfigError(f"a request rate of {rate} per second is not a positive number")
    gaps = np.random.default_rng((seed, 3)).exponential(1 / rate, count)
    return [float(time) for time in np.cumsum(gaps) - gaps[0]] if count else []


def load_requests(path: Path, default_max_tokens: int) -> list[BenchRequest]:
    """Requests from a JSONL file: per line {"prompt": text or [token ids], "max_tokens": number (optional)}.

    Raises: ConfigError, naming the line.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read the prompts in {path}: {error.strerror}") from error
    requests = [
        _parse_line(line, default_max_tokens, f"{path}, line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not requests:
        raise ConfigError(f"{path} holds no prompts: one JSON object per line is expected")
    return requests


def _parse_line(line: bytes, default_max_tokens: int, where: str) -> BenchRequest:
    try:
        fields = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{where} is not JSON ({error}): one object per line is expected") from error
    if not isinstance(fields, dict):
        raise ConfigError(f'{where} is not an object: expected {{"prompt": …, "max_tokens": …}}')
    unknown = fields.keys() - {"prompt", "max_tokens"}
    if unknown:
        raise ConfigError(f"{where} has the unknown field {min(unknown)!r}: only prompt and max_tokens are read")
    prompt, max_tokens = fields.get("prompt"), fields.get("max_tokens", default_max_tokens)
    if not _is_count(max_tokens) or max_tokens < 1:
        raise ConfigError(f"{where}: max_tokens is {max_tokens!r}, not a whole number >= 1")
    if isinstance(prompt, str) and prompt:
        return BenchRequest(prompt, max_tokens)
    if isinstance(prompt, list) and prompt and all(_is_count(token) and token >= 0 for token in prompt):
        return BenchRequest(tuple(prompt), max_tokens)
    raise ConfigError(f"{where}: prompt must be a non-empty text or a non-empty list of token ids")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
