"""Few combinations of options that hold every pair of values."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Combination = dict[str, Any]
Pair = tuple[str, Any, str, Any]


def pairs_of(combination: Mapping[str, Any]) -> Iterator[Pair]:
    """The pairs that a combination holds, names in its order."""
    for (first, value), (second, other) in itertools.combinations(combination.items(), 2):
        yield first, value, second, other


def all_pairs(choices: Mapping[str, Sequence[Any]]) -> dict[Pair, None]:
    """Every pair of values of two options, in a fixed order."""
    return {
        (first, value, second, other): None
        for first, second in itertools.combinations(choices, 2)
        for value, other in itertools.product(choices[first], choices[second])
    }


def covering_array(choices: Mapping[str, Sequence[Any]], seed: int = 0) -> list[Combination]:
    """Combinations that together hold every pair: greedily, each begins with a pair that is missing and takes, option
    after option, the value that adds most (in the manner of Cohen et al. 1997). The same seed gives the same.
    """
    rng = random.Random(seed)
    missing = all_pairs(choices)
    combinations = []
    while missing:
        first, value, second, other = next(iter(missing))
        chosen = {first: value, second: other}
        others = [name for name in choices if name not in chosen]
        for name in rng.sample(others, len(others)):
            values = rng.sample(list(choices[name]), len(choices[name]))
            chosen[name] = max(values, key=lambda each: _num_added(choices, chosen, name, each, missing))  # noqa: B023
        combinations.append({name: chosen[name] for name in choices})
        for pair in pairs_of(combinations[-1]):
            missing.pop(pair, None)
    return combinations


def _num_added(
    choices: Mapping[str, Any], chosen: Combination, name: str, value: Any, missing: Mapping[Pair, None]
) -> int:
    in_order = {each: (value if each == name else chosen[each]) for each in choices if each == name or each in chosen}
    return sum(pair in missing for pair in pairs_of(in_order) if name in (pair[0], pair[2]))
