"""Answers to JSON schemas, judged: does each schema compile, does each answer fit and end by itself.

    python benchmarks/schemas.py [--model smollm2] [--seed 7] [--output FILE]

Every schema of tests/support/json_schemas.py is asked at temperatures 0 and 1, with at most 512 tokens, all together;
the `jsonschema` package judges the answers. Targets: at least 54 of at least 60 accepted, every answer valid and
ended by `stop`, every refusal naming its keyword. Prints a line per answer; writes dated JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from jsonschema import Draft202012Validator, ValidationError

from harness.results import new_document, result_path, save
from ropeway import LLM, SamplingParams
from ropeway.errors import InvalidRequestError
from ropeway.text.grammar import json_schema_grammar
from support.json_schemas import REFUSED, SUPPORTED

TEMPERATURES = (0.0, 1.0)
MAX_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one schema at one temperature. problem: why the answer does not fit; None where it does."""

    schema: str
    temperature: float
    num_tokens: int
    finish_reason: str | None
    problem: str | None
    text: str

    @property
    def is_right(self) -> bool:
        return self.finish_reason == "stop" and self.problem is None


def compile_all() -> tuple[dict[str, str], dict[str, str]]:
    """Grammars by schema name, and the messages of what was refused."""
    grammars, refusals = {}, {}
    for name, schema in SUPPORTED.items():
        try:
            grammars[name] = json_schema_grammar(schema)
        except InvalidRequestError as error:
            refusals[name] = str(error)
    return grammars, refusals


def refusal_messages() -> dict[str, str]:
    """What is said of schemas with an unsupported keyword, by that keyword."""
    messages = {}
    for keyword, schema in REFUSED.items():
        try:
            json_schema_grammar(schema)
            messages[keyword] = "accepted"
        except InvalidRequestError as error:
            messages[keyword] = str(error)
    return messages


def judge(name: str, temperature: float, text: str, num_tokens: int, finish_reason: str | None) -> Verdict:
    """Whether an answer is JSON that fits."""
    problem = None
    try:
        validator = Draft202012Validator(SUPPORTED[name], format_checker=Draft202012Validator.FORMAT_CHECKER)
        validator.validate(json.loads(text))
    except ValidationError as error:
        problem = error.message
    except ValueError as error:
        problem = f"not JSON: {error}"
    return Verdict(name, temperature, num_tokens, finish_reason, problem, text)


def main() -> int:
    parser = argparse.ArgumentParser(description="Judges answers to JSON schemas.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    document = new_document("schemas", {"seed": args.seed, "model": args.model, "max_tokens": MAX_TOKENS})
    grammars, refusals = compile_all()
    messages = refusal_messages()
    print(f"{len(grammars)} of {len(SUPPORTED)} schemas accepted")
    llm = LLM(args.model, max_model_len=1024)
    asked = [(name, temperature) for name in grammars for temperature in TEMPERATURES]
    requests = (
        (
            llm.encode_chat([{"role": "user", "content": f"Give me an example as JSON: {name}."}]),
            SamplingParams(temperature=temperature, seed=args.seed, max_tokens=MAX_TOKENS, grammar=grammars[name]),
        )
        for name, temperature in asked
    )
    start_s, verdicts = time.monotonic(), []
    for position, output in llm.generate_each(requests):
        completion = output.outputs[0]
        verdict = judge(*asked[position], completion.text, len(completion.token_ids), completion.finish_reason)
        verdicts.append(verdict)
        mark = "ok " if verdict.is_right else "BAD"
        what = verdict.problem or "fits"
        print(f"{mark} {verdict.schema}, {verdict.temperature:g}: {verdict.num_tokens} tokens, {what}")
    num_right = sum(verdict.is_right for verdict in verdicts)
    unnamed = [keyword for keyword, message in messages.items() if keyword not in message]
    document |= {
        "num_schemas": len(SUPPORTED),
        "num_accepted": len(grammars),
        "num_answers": len(verdicts),
        "num_right": num_right,
        "seconds": round(time.monotonic() - start_s, 1),
        "refused": refusals,
        "refusal_messages": messages,
        "answers": [asdict(verdict) for verdict in sorted(verdicts, key=lambda each: (each.schema, each.temperature))],
    }
    path = args.output or result_path(document)
    save(path, document)
    print(f"{num_right} of {len(verdicts)} answers fit and ended by themselves; {path}")
    return 0 if num_right == len(verdicts) and len(grammars) >= 54 and not unnamed else 1


if __name__ == "__main__":
    sys.exit(main())
