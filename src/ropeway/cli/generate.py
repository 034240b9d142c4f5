"""`ropeway generate`: completes prompts from the command line or from a JSONL file (see `cli.offline`)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropeway.cli.options import add_engine_arguments, add_model_argument, engine_options
from ropeway.core.params import SamplingParams
from ropeway.errors import ConfigError

if TYPE_CHECKING:
    from ropeway.inputs import EncodedPrompt, Prompt
    from ropeway.outputs import RequestOutput

DEFAULT_MAX_TOKENS = 256
USUAL: dict[str, Any] = {"max_tokens": DEFAULT_MAX_TOKENS, "temperature": 0.0}
# The input is the queue, and it is as long as it is.
QUEUE_OPTIONS = ("max_num_queued_reqs", "max_num_queued_tokens")
SAMPLING_FLAGS = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "n")


def add_parser(subparsers: Any) -> None:
    """Adds `generate`."""
    parser = subparsers.add_parser(
        "generate",
        help="complete prompts and print or store the answers",
        description="Completes prompts. --input has a JSON object per line: either prompt (text or token ids) or "
        "messages, with other fields of a request's body; or a line of a batch (custom_id, method, url, body). "
        "--output gets a line per answer, as batches have it, in the order of the input; OUTPUT.journal holds what is "
        "answered meanwhile, so that a run started again goes on where it was cut off.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=run_generate)
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="text to complete")
    add_model_argument(parser, "--model")
    parser.add_argument("--chat", action="store_true", help="each PROMPT is a user's message, put through the "
        "model's chat template; default: it is text to go on with")  # fmt: skip
    parser.add_argument("--input", type=Path, metavar="FILE", help="JSONL of prompts")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSONL of answers; needed with --input")
    group = parser.add_argument_group("sampling")
    add = group.add_argument
    add("--max-tokens", type=int, metavar="N", help=f"most tokens of an answer; default: {DEFAULT_MAX_TOKENS}")
    add("--temperature", type=float, metavar="T", help="default: 0, which is greedy; higher is more varied")
    add("--top-p", type=float, metavar="P", help="share of probability to choose from, above 0 to 1; default: 1")
    add("--top-k", type=int, metavar="K", help="choose from the K likeliest tokens; default: 0, all")
    add("--min-p", type=float, metavar="P", help="drop tokens less likely than P times the likeliest; default: 0")
    add("--seed", type=int, help="of the random numbers; default: for a PROMPT drawn, for a line of --input made of "
        "its number and content, so that a run repeats")  # fmt: skip
    add("--stop", action="append", metavar="TEXT", help="text that ends an answer; may be repeated; default: none")
    add("--n", type=int, metavar="N", help="answers per prompt; default: 1")
    add_engine_arguments(parser)


def run_generate(args: argparse.Namespace) -> int:
    """Runs prompts of one kind or the other; 0 when every one was answered, 1 when lines of a file were refused."""
    if bool(args.prompts) == (args.input is not None):
        raise ConfigError("give prompts on the command line or --input FILE, one of them")
    if (args.input is None) != (args.output is None):
        raise ConfigError("--input and --output go together")
    given = {name: value for name in SAMPLING_FLAGS if (value := getattr(args, name)) is not None}
    params = SamplingParams(**{**USUAL, **given})  # a wrong flag is told before a model is loaded
    return _run_prompts(args, params) if args.prompts else _run_file(args, given)


def _run_prompts(args: argparse.Namespace, params: SamplingParams) -> int:
    from ropeway.llm import LLM

    llm = LLM(args.model, **engine_options(args))
    prompts: list[Prompt | EncodedPrompt] = list(args.prompts)
    if args.chat:
        prompts = [llm.encode_chat([{"role": "user", "content": prompt}]) for prompt in args.prompts]
    bar = _TokenBar(len(prompts), is_shown=len(prompts) > 1)
    answers: dict[int, RequestOutput] = {}
    for position, output in llm.generate_each([(prompt, params) for prompt in prompts]):
        answers[position] = output
        bar.update(sum(len(completion.token_ids) for completion in output.outputs))
    bar.close()
    for position, text in enumerate(args.prompts):
        for completion in answers[position].outputs:
            # A completion goes on where its prompt ends; a chat answer stands alone.
            print(completion.text if args.chat else text + completion.text)
    return 0


def _run_file(args: argparse.Namespace, given: dict[str, Any]) -> int:
    from ropeway.cli.offline import OfflineBatch, OfflineRun
    from ropeway.cli.prompt_lines import batch_lines

    lines = b"".join(batch_lines(args.input, given, USUAL))
    options = {name: value for name, value in engine_options(args).items() if name not in QUEUE_OPTIONS}
    with OfflineRun(OfflineBatch(args.output, lines, str(args.model), options)) as run:
        before = run.progress
        if before.num_answered:
            print(f"{before.num_answered} of {before.num_lines} lines are answered already", file=sys.stderr)
        bar = _TokenBar(before.num_lines, initial=before.num_answered)
        run.answer(lambda answer: bar.update(answer.num_output_tokens))
        bar.close()
        num_refused, num_lines = run.progress.num_refused, run.progress.num_lines
    if num_refused:
        print(f"{num_refused} of {num_lines} lines were refused; see their `response.body.error`", file=sys.stderr)
    return 1 if num_refused else 0


class _TokenBar:
    """A progress bar on stderr that counts prompts and tells tokens per second."""

    def __init__(self, total: int, *, initial: int = 0, is_shown: bool = True) -> None:
        from tqdm import tqdm

        # None: shown where stderr is a terminal.
        self._bar = tqdm(total=total, initial=initial, unit="prompt", disable=None if is_shown else True)
        self._num_tokens = 0

    def update(self, num_tokens: int) -> None:
        self._num_tokens += num_tokens
        elapsed_s = self._bar.format_dict["elapsed"]
        if elapsed_s:
            self._bar.set_postfix_str(f"{self._num_tokens / elapsed_s:.0f} tokens/s", refresh=False)
        self._bar.update()

    def close(self) -> None:
        self._bar.close()
