"""The one place where an engine is put together: model file + `EngineConfig` -> `LLM` or `AsyncLLM`.

May read the clock and free memory. Knows nothing of HTTP.
"""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeGuard

from ropeway.backends.batch import Backend
from ropeway.calibration import calibrate_step_costs
from ropeway.catalog import CATALOG, DEFAULT_MODEL, resolve_model
from ropeway.config import EngineConfig, EngineFacts, ModelFacts, resolve
from ropeway.core.params import Request, SamplingParams, ServiceTerms
from ropeway.core.recipe import SchedulerRecipe
from ropeway.core.stats import EngineStats
from ropeway.core.step_time import StepCosts
from ropeway.engine.async_engine import AsyncEngine
from ropeway.engine.decision_log_file import DecisionLogFile
from ropeway.engine.decision_recorder import DecisionRecorder, RecordingHasher
from ropeway.engine.engine import Engine
from ropeway.engine.output_stream import OutputStream
from ropeway.engine.runner import Runner
from ropeway.errors import ConfigError, InvalidRequestError, ModelFileError
from ropeway.inputs import EncodedPrompt, Message, Prompt, RequestBuilder
from ropeway.machine_limits import IdleLimits, MachineLimits
from ropeway.machine_share import free_memory_bytes
from ropeway.model.loading import Model, load_model
from ropeway.model.sampling_defaults import sampling_defaults
from ropeway.outputs import Assembler, RequestOutput, Transcript
from ropeway.text.chat_template import ChatTemplate, template_source
from ropeway.text.grammar import Grammars
from ropeway.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ropeway.backends.native import NativeBackend

logger = logging.getLogger(__name__)

# `generate_each` keeps this many requests waiting per one that may run, so the engine never lacks work.
QUEUE_DEPTH_RATIO = 2

OutputKind = Literal["cumulative", "delta", "final"]
ModelSource = str | os.PathLike[str]


@dataclass(frozen=True, slots=True, eq=False)
class LoadedEngine:
    """A model ready to run: the engine, what turns prompts into its requests, and the facts to show."""

    engine: Engine
    builder: RequestBuilder
    backend: Backend
    facts: EngineFacts
    path: str
    decision_log: DecisionLogFile | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        return self.builder.tokenizer


@dataclass(frozen=True, slots=True, eq=False)
class PreparedModel:
    """A model in memory, its weights packed, whose steps have not been timed yet."""

    model: Model
    builder: RequestBuilder
    backend: Backend
    facts: EngineFacts
    path: str


def load_engine(model: ModelSource, config: EngineConfig) -> LoadedEngine:
    """Loads a model by catalog name or path and puts an engine together.

    Raises ModelFetchError, ModelFileError, ConfigError (OutOfMemoryError) or UnsupportedIsaError, each with its remedy.
    """
    return finish_engine(prepare_model(model, config))


def prepare_model(model: ModelSource, config: EngineConfig) -> PreparedModel:
    """The part of `load_engine` that may run beside other work. Raises as it does."""
    start_s = time.monotonic()
    path = resolve_model(model)
    loaded = load_model(path)
    tokenizer = Tokenizer.from_metadata(loaded.metadata)
    check_vocabulary(tokenizer, loaded)
    chat_template = make_chat_template(loaded, config)
    name = os.fspath(model)
    facts = resolve(config, model_facts(name if name in CATALOG else path.stem, loaded, config), free_memory_bytes())
    for warning in facts.warnings:
        logger.warning("%s", warning)
    backend = make_backend(loaded, facts)
    builder = RequestBuilder(
        tokenizer,
        chat_template,
        max_model_len=facts.max_model_len,
        vocab_size=loaded.program.vocab_size,
        has_priorities=facts.scheduling_policy == "priority",
        default_sampling=sampling_defaults(loaded.metadata),
    )
    logger.info("loaded %s in %.2f s", path.name, time.monotonic() - start_s)
    return PreparedModel(loaded, builder, backend, facts, os.fspath(path))


def finish_engine(prepared: PreparedModel) -> LoadedEngine:
    """The rest of `load_engine`: times steps, so that they can be paced from the first on; wants a quiet machine."""
    program, facts = prepared.model.program, prepared.facts
    start_s = time.monotonic()
    costs = calibrate_step_costs(prepared.backend, program, facts)
    logger.info(
        "a step costs %.1f ms and %.2f ms per token: timed in %.2f s",
        costs.fixed_s * 1000,
        costs.token_s * 1000,
        time.monotonic() - start_s,
    )
    num_cache_groups = len(program.cache_groups)
    recipe = scheduler_recipe(
        facts, num_cache_groups=num_cache_groups, costs=costs, num_layers=prepared.backend.num_layers
    )
    decision_log = open_decision_log(facts, recipe)
    engine = make_engine(prepared.backend, recipe, decision_log, prepared.builder.grammars)
    return LoadedEngine(engine, prepared.builder, prepared.backend, facts, prepared.path, decision_log)


def check_vocabulary(tokenizer: Tokenizer, model: Model) -> None:
    """Raises ModelFileError where the model can draw ids that the tokenizer has no token for, or lacks rows for some.

    The logits of a head that is padded beyond the vocabulary mean nothing, and such an id has no text.
    """
    num_rows = model.program.vocab_size
    if tokenizer.vocab_size != num_rows:
        raise ModelFileError(
            f"the model has embeddings for {num_rows} tokens but the tokenizer has {tokenizer.vocab_size}; convert "
            "the model to GGUF again with a converter that writes both of one length"
        )


def make_chat_template(model: Model, config: EngineConfig) -> ChatTemplate:
    """The template that `config` names, or the file's own. Raises ConfigError, ModelFileError."""
    if config.chat_template is None:
        return ChatTemplate.from_metadata(model.metadata)
    source = template_source(config.chat_template)
    try:
        return ChatTemplate.from_metadata({**model.metadata, "tokenizer.chat_template": source})
    except ModelFileError as error:
        raise ConfigError(f"--chat-template: {error}") from None


def model_facts(name: str, model: Model, config: EngineConfig) -> ModelFacts:
    """What `resolve` needs, from a loaded model. The native backend caches keys and values in 2 bytes each."""
    value_bytes = 2 if config.backend == "native" else 4
    num_values = sum(
        2 * len(group.layers) * group.num_kv_heads * group.head_dim for group in model.program.cache_groups
    )
    return ModelFacts(
        name=name,
        context_length=model.program.context_length,
        kv_bytes_per_token=num_values * value_bytes,
        weights_bytes=sum(tensor.data.nbytes for tensor in model.tensors.values()),
    )


def make_backend(model: Model, facts: EngineFacts) -> Backend:
    """The backend that `facts` name, with the model's weights and its KV pool."""
    program, tensors = model.program, model.tensors
    if facts.backend == "reference":
        from ropeway.backends.reference import ReferenceBackend

        return ReferenceBackend(program, tensors, num_kv_blocks=facts.num_kv_blocks, block_size=facts.block_size)
    from ropeway.backends.native import NativeBackend

    return NativeBackend(
        program,
        tensors,
        num_kv_blocks=facts.num_kv_blocks,
        block_size=facts.block_size,
        num_threads=facts.num_threads,
        isa=facts.isa,
    )


def scheduler_recipe(
    facts: EngineFacts, *, num_cache_groups: int = 1, costs: StepCosts | None = None, num_layers: int = 1
) -> SchedulerRecipe:
    """The part of the facts that decides the schedule. costs: of a step, at first; None paces by tokens only.

    num_layers: of the backend, that a chunk can be sliced by.
    """
    recipe = SchedulerRecipe(
        max_num_seqs=facts.max_num_seqs,
        max_num_batched_tokens=facts.max_num_batched_tokens,
        max_model_len=facts.max_model_len,
        num_kv_blocks=facts.num_kv_blocks,
        block_size=facts.block_size,
        num_cache_groups=num_cache_groups,
        batching=facts.batching,
        scheduling_policy=facts.scheduling_policy,
        priority_aging_s=facts.priority_aging_s,
        background_share=facts.background_share,
        max_num_queued_reqs=facts.max_num_queued_reqs,
        max_num_queued_tokens=facts.max_num_queued_tokens,
        admission=facts.admission,
        objective=facts.objective,
        slo_ttft_s=facts.slo_ttft_s,
        slo_tpot_s=facts.slo_tpot_s,
        has_prefix_cache=facts.has_prefix_cache,
        num_layers=num_layers,
    )
    return recipe if costs is None else recipe.with_step_costs(costs)


def open_decision_log(facts: EngineFacts, recipe: SchedulerRecipe) -> DecisionLogFile | None:
    """The log that `facts` ask for. Raises ConfigError where it cannot be written."""
    if facts.decision_log is None:
        return None
    return DecisionLogFile(Path(facts.decision_log), recipe.to_values(), facts.decision_log_bytes)


def make_engine(
    backend: Backend,
    recipe: SchedulerRecipe,
    decision_log: DecisionLogFile | None = None,
    grammars: Grammars | None = None,
) -> Engine:
    """An engine on a backend, with a scheduler made from `recipe`. grammars: those that requests are built with."""
    runner = Runner(
        backend,
        max_num_seqs=recipe.max_num_seqs,
        max_model_len=recipe.max_model_len,
        num_cache_groups=recipe.num_cache_groups,
        grammars=grammars,
    )
    if decision_log is None:
        return Engine(recipe.make(), runner, time.monotonic)
    recorder = DecisionRecorder(decision_log.put, key=os.urandom(32))
    hasher = RecordingHasher(recipe.block_size, recorder.note_hash)
    return Engine(recipe.make(hasher), runner, time.monotonic, recorder)


class LLM:
    """A model for offline use, in vLLM's shapes. One caller at a time; runs on the calling thread.

    model: a catalog name or the path of a GGUF file. options: the fields of `EngineConfig`.
    """

    def __init__(self, model: ModelSource = DEFAULT_MODEL, **options: object) -> None:
        config = EngineConfig.from_options(options)
        # The caller's list is the queue, and it is as long as it is.
        config = replace(config, max_num_queued_reqs=None, max_num_queued_tokens=None)
        self._loaded = load_engine(model, config)
        self._request_ids = itertools.count()

    @property
    def facts(self) -> EngineFacts:
        return self._loaded.facts

    @property
    def tokenizer(self) -> Tokenizer:
        return self._loaded.tokenizer

    def default_sampling_params(self) -> SamplingParams:
        """What is used where no parameters are given: SamplingParams with what the model's makers advise."""
        return SamplingParams(**self._loaded.builder.default_sampling)  # type: ignore[arg-type]

    def stats(self) -> EngineStats:
        """The engine's counters."""
        return self._loaded.engine.stats()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Completes every prompt; answers come in the order of the prompts.

        prompts: one prompt or a list; a prompt is text, token ids, or {"prompt_token_ids": ids}.
        sampling_params: one for all, or one per prompt. use_tqdm: a progress bar on stderr.

        Raises InvalidRequestError before anything runs, where a prompt or its parameters are wrong.
        """
        encoded = [self._loaded.builder.encode(prompt) for prompt in _as_list(prompts)]
        return self._run_all(encoded, sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation, or each of a list, through the model's chat template. Otherwise as `generate`.

        chat_template_kwargs: variables that the template may look at, such as enable_thinking.
        """
        is_one = not messages or isinstance(messages[0], Mapping)
        conversations = [messages] if is_one else messages
        encode, variables = self._loaded.builder.encode_chat, chat_template_kwargs
        encoded = [encode(each, template_variables=variables) for each in conversations]  # type: ignore[arg-type]
        return self._run_all(encoded, sampling_params, use_tqdm)

    def generate_each(
        self, items: Iterable[tuple[Prompt | EncodedPrompt, SamplingParams]]
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Yields (position in `items`, answer) as answers finish. Reads `items` only as fast as there is room to run
        them.

        Leaving the iterator early aborts what is running.
        """
        builder, engine = self._loaded.builder, self._loaded.engine
        most_open = QUEUE_DEPTH_RATIO * (self.facts.max_num_seqs)
        source = enumerate(items)
        run = _OfflineRun(engine, builder.tokenizer)
        try:
            while True:
                for position, (prompt, params) in itertools.islice(source, max(0, most_open - run.num_open)):
                    encoded = prompt if isinstance(prompt, EncodedPrompt) else builder.encode(prompt)
                    run.submit(position, builder.build(encoded, params, f"offline-{next(self._request_ids)}"), encoded)
                if not run.num_open:
                    return
                yield from run.step()
        finally:
            run.abort_all()

    def encode(self, prompt: Prompt) -> EncodedPrompt:
        """A prompt, checked and encoded, for `generate_each`. Raises InvalidRequestError."""
        return self._loaded.builder.encode(prompt)

    def encode_chat(self, messages: Sequence[Message]) -> EncodedPrompt:
        """A conversation as a prompt for `generate_each`. Raises InvalidRequestError."""
        return self._loaded.builder.encode_chat(messages)

    def check(self, prompt: EncodedPrompt, params: SamplingParams) -> None:
        """Raises InvalidRequestError where `generate_each` would for these two."""
        self._loaded.builder.build(prompt, params, "check")

    def _run_all(
        self,
        prompts: Sequence[EncodedPrompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        if params is None or isinstance(params, SamplingParams):
            each = [params or self.default_sampling_params()] * len(prompts)
        else:
            each = list(params)
        if len(each) != len(prompts):
            raise InvalidRequestError(f"{len(prompts)} prompts but {len(each)} sampling parameters; give one for each")
        for prompt, one in zip(prompts, each, strict=True):
            self.check(prompt, one)
        from tqdm import tqdm  # 30 ms that a server's start does without

        answers: dict[int, RequestOutput] = {}
        with tqdm(total=len(prompts), unit="prompt", disable=not use_tqdm) as bar:
            for position, output in self.generate_each(zip(prompts, each, strict=True)):
                answers[position] = output
                bar.update()
        return [answers[position] for position in range(len(prompts))]


class _OfflineRun:
    """The requests of one `generate_each`: submits, steps, assembles."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._open: dict[str, tuple[int, Assembler, Transcript]] = {}

    @property
    def num_open(self) -> int:
        return len(self._open)

    def submit(self, position: int, request: Request, prompt: EncodedPrompt) -> None:
        self._engine.submit(request)
        assembler, transcript = Assembler(request, self._tokenizer), Transcript(request, prompt.text)
        self._open[request.request_id] = (position, assembler, transcript)

    def step(self) -> Iterator[tuple[int, RequestOutput]]:
        """One step of the engine; yields what it finished."""
        events = self._engine.step()
        for event in events:
            if event.request_id not in self._open:  # ended by a stop string just now
                continue
            position, assembler, transcript = self._open[event.request_id]
            delta = assembler.push(event)
            if delta is None:
                continue
            transcript.add(delta)
            if delta.is_stopped_by_text:
                self._engine.stop(delta.request_id, delta.index)
            if assembler.is_finished:
                del self._open[event.request_id]
                yield position, transcript.output()

    def abort_all(self) -> None:
        for request_id in self._open:
            self._engine.abort(request_id)
        self._open.clear()


class AsyncLLM:
    """A model inside an asyncio program. Starts its engine thread at the first request, or on `async with`.

    model: a catalog name or the path of a GGUF file. options: the fields of `EngineConfig`.
    """

    def __init__(self, model: ModelSource = DEFAULT_MODEL, **options: object) -> None:
        self._set_up(load_engine(model, EngineConfig.from_options(options)))

    @classmethod
    def from_prepared(cls, prepared: PreparedModel) -> AsyncLLM:
        """An AsyncLLM of a model that `prepare_model` has loaded, perhaps on another thread."""
        llm = cls.__new__(cls)
        llm._set_up(finish_engine(prepared))
        return llm

    def _set_up(self, loaded: LoadedEngine) -> None:
        self._loaded = loaded
        backend = loaded.backend
        self.engine = AsyncEngine(loaded.engine, loaded.tokenizer, backend if _is_metered(backend) else None)
        is_idle = self.engine.is_idle
        self._limits = IdleLimits(backend.num_threads, backend.isa, is_idle) if _is_metered(backend) else None
        self._is_started = False

    @property
    def facts(self) -> EngineFacts:
        return self._loaded.facts

    @property
    def builder(self) -> RequestBuilder:
        return self._loaded.builder

    def machine_limits(self) -> MachineLimits | None:
        """What this machine can do at most with the engine's threads; None until it has been measured.

        The first call while no request is open begins to measure, in the background, for about half a second.
        """
        return None if self._limits is None else self._limits.ask()

    async def __aenter__(self) -> AsyncLLM:
        self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.shutdown(0.0)

    def start(self) -> None:
        """Starts the engine on the running event loop; does nothing the second time."""
        if not self._is_started:
            self._is_started = True
            self.engine.start()

    def submit(self, requests: Sequence[Request]) -> OutputStream:
        """Hands over requests made by `builder`; their deltas come out of one stream."""
        self.start()
        return self.engine.submit(requests)

    async def generate(
        self,
        prompt: Prompt | EncodedPrompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        output_kind: OutputKind = "cumulative",
        terms: ServiceTerms | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yields a RequestOutput at each step that brings news.

        output_kind: `cumulative` (as in vLLM) repeats everything so far, `delta` has only what is new, `final` comes
        once. terms: on whose account it is served, and how soon.
        Closing the iterator, or cancelling its task, aborts the request. Raises InvalidRequestError,
        EngineStoppedError.
        """
        encoded = prompt if isinstance(prompt, EncodedPrompt) else self.builder.encode(prompt)
        request_id = request_id or f"async-{secrets.token_hex(16)}"
        request = self.builder.build(encoded, sampling_params or SamplingParams(), request_id, terms)
        transcript = Transcript(request, encoded.text)
        async with self.submit([request]) as stream:
            while deltas := await stream.take():
                for delta in deltas:
                    transcript.add(delta)
                if output_kind == "delta":
                    yield transcript.delta_output(deltas)
                elif output_kind == "cumulative" or stream.is_finished:
                    yield transcript.output()

    def abort(self, request_id: str) -> None:
        """Ends a request with finish reason `abort`; may be called from any thread."""
        self.engine.abort(request_id)

    async def shutdown(self, timeout_s: float = 0.0) -> bool:
        """Refuses new requests, lets open ones finish for timeout_s, aborts the rest. True where none had to be
        aborted.
        """
        if self._limits is not None:
            self._limits.close()
        is_drained = await self.engine.shutdown(timeout_s) if self._is_started else True
        if self._loaded.decision_log is not None:
            self._loaded.decision_log.close()
        return is_drained


def _is_metered(backend: Backend) -> TypeGuard[NativeBackend]:
    from ropeway.backends.native import NativeBackend

    return isinstance(backend, NativeBackend)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]  # type: ignore[list-item]  # token ids are one prompt
    return list(prompts)  # type: ignore[arg-type]
