"""The engine with a prefix cache under every order of calls, over a backend that checks what each row reads.

Prompts are beginnings of few texts, tenants few, pools tiny: hits, evictions, preemptions, copies and failures all come
about. Every finished answer is what the prompt alone decides.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.support.fake_backend import FakeBackend

from ropeway.backends.batch import Float32Array, ForwardBatch
from ropeway.core.admission import Admission, OptimisticAdmission, ReserveAdmission
from ropeway.core.batching import ContinuousBatching
from ropeway.core.kv_manager import KVManager
from ropeway.core.params import Request, SamplingParams, ServiceTerms
from ropeway.core.prefix_index import TokenHasher
from ropeway.core.scheduler import Scheduler, SchedulerLimits
from ropeway.core.sequence import Sequence
from ropeway.engine.engine import Engine
from ropeway.engine.runner import Runner

TEXTS = ((1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12), (1, 2, 3, 4, 5, 9, 9, 9, 9, 9, 9, 9))
TERMS = (ServiceTerms(tenant="ab"), ServiceTerms(tenant="a", cache_salt="b"))


class FragileBackend(FakeBackend):
    """Fails once, when told to: before or after it has written the step's tokens."""

    fails_next = ""
    num_failures = 0

    def forward(self, batch: ForwardBatch) -> Float32Array:
        fails_next, self.fails_next = self.fails_next, ""
        self.num_failures += bool(fails_next)
        if fails_next == "before":
            raise MemoryError("on purpose")
        logits = super().forward(batch)
        if fails_next == "after":
            raise MemoryError("on purpose")
        return logits


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(5, 14),
        block_size=st.integers(2, 4),
        budget=st.sampled_from([3, 6, 24]),
        admission=st.sampled_from([OptimisticAdmission(), OptimisticAdmission(1), ReserveAdmission()]),
    )
    def start(self, num_blocks: int, block_size: int, budget: int, admission: Admission) -> None:
        self.backend = FragileBackend(num_kv_blocks=num_blocks, block_size=block_size, first_token_id=16)
        context = num_blocks * block_size
        self.context = context
        kv = KVManager([num_blocks], block_size, TokenHasher(block_size))
        limits = SchedulerLimits(4, budget, context)
        self.scheduler = Scheduler(limits, kv, batching=ContinuousBatching(admission))
        self.engine = Engine(self.scheduler, Runner(self.backend, max_num_seqs=4, max_model_len=context), lambda: 0.0)
        self.requests: dict[str, Request] = {}
        self.answers: dict[tuple[str, int], list[int]] = {}
        self.endings: dict[tuple[str, int], str] = {}

    @rule(
        text=st.sampled_from(TEXTS),
        num_prompt_tokens=st.sampled_from([12, 11, 10, 9, 8, 7, 5, 3, 1]),
        max_tokens=st.sampled_from([6, 4, 2, 1]),
        n=st.sampled_from([1, 3, 2]),
        terms=st.sampled_from(TERMS),
        skips=st.integers(0, 9),
    )
    def submit(
        self, text: tuple[int, ...], num_prompt_tokens: int, max_tokens: int, n: int, terms: ServiceTerms, skips: int
    ) -> None:
        if num_prompt_tokens + max_tokens > self.context:
            return
        request = Request(
            request_id=str(len(self.requests)),
            prompt_token_ids=text[:num_prompt_tokens],
            params=SamplingParams(max_tokens=max_tokens, n=n, temperature=0.0),
            max_tokens=max_tokens,
            seed=0,
            terms=terms,
            skips_prefix_cache=skips == 0,
        )
        self.requests[request.request_id] = request
        self.engine.submit(request)

    @rule(num_steps=st.integers(1, 4))
    def step(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            self._step()

    def _step(self) -> None:
        has_work, num_computed = self.engine.has_work, self.backend.num_tokens_computed
        for event in self.engine.step():
            key = (event.request_id, event.index)
            self.answers.setdefault(key, []).extend(event.token_ids)
            assert event.num_cached_tokens < len(self.requests[event.request_id].prompt_token_ids), "nothing was left"
            assert not (self.requests[event.request_id].skips_prefix_cache and event.num_cached_tokens)
            if event.finish_reason:
                self.endings[key] = event.finish_reason
        # BlockTableCorruption would be a failed step, too.
        assert self.engine.stats().num_failed_steps == self.backend.num_failures, "a row read what is not its own"
        assert self.backend.num_tokens_computed > num_computed or not has_work or self.backend.num_failures

    @precondition(lambda self: self.engine.has_work)
    @rule(number=st.integers(0, 20), chance=st.integers(0, 3))
    def abort(self, number: int, chance: int) -> None:
        for event in self.engine.abort(str(number % len(self.requests))) if chance == 0 else ():
            self.endings[event.request_id, event.index] = "abort"

    @precondition(lambda self: self.engine.has_work)
    @rule(moment=st.sampled_from(["before", "after"]), chance=st.integers(0, 4))
    def fail(self, moment: str, chance: int) -> None:
        if chance == 0:
            self.backend.fails_next = moment
            self.step()

    @invariant()
    def blocks_are_shared_rightly(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check_invariants()
        holders: dict[int, list[tuple[int, Sequence]]] = {}
        for sequence in self.scheduler._roster.running.values():
            for place, block_id in enumerate(sequence.block_ids[0]):
                holders.setdefault(block_id, []).append((place, sequence))
        for sharing in holders.values():
            assert len({place for place, _ in sharing}) == 1, "one block at two places"
            tenancies = {(s.request.terms.tenant, s.request.terms.cache_salt) for _, s in sharing}
            assert len(tenancies) == 1, "tenants, or salts, share a block"

    @invariant()
    def answers_are_what_the_prompt_decides(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for (request_id, _), token_ids in self.answers.items():
            prompt = self.requests[request_id].prompt_token_ids
            assert tuple(token_ids) == self.backend.expected_tokens(prompt, len(token_ids))

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(3000):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work, "somebody waits for ever"
        self.blocks_are_shared_rightly()
        self.answers_are_what_the_prompt_decides()
        stats = self.engine.stats()
        assert stats.num_used_blocks == 0
        assert len(self.endings) == sum(request.params.n for request in self.requests.values())


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
