# `make serve` and `make test` are all a newcomer needs; each does its own set-up. Paths are relative: the clone may be anywhere.
.PHONY: help setup serve test sanitize lint format oracle evidence-numerics evidence-peers evidence-kernels evidence-overheads evidence-batching evidence-scheduler-cost evidence-exhaustive evidence-scheduler-walk evidence-schemas evidence-fuzz evidence-lm-eval evidence-schemathesis \
	evidence-interference evidence-no-collapse evidence-fairness evidence-slo evidence-replay evidence-bounds evidence-soak evidence-side-effects invariance wheel clean
.DEFAULT_GOAL := help

ROPEWAY = .venv/bin/ropeway
PYTHON_VENV = .venv/bin/python
NATIVE_SOURCES = $(shell find native -name '*.h' -o -name '*.cpp')

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 24

serve: ## set up, fetch the default model, serve it on 127.0.0.1:8000 (ARGS="--port 9000" adds flags)
	@scripts/setup.sh run
	@echo "4/4 server"
	@scripts/env.sh $(ROPEWAY) serve $(ARGS)

test: ## set up and run the tests (ARGS="-k sampler" adds pytest arguments)
	@scripts/setup.sh dev
	@echo "4/4 tests"
	@scripts/env.sh $(PYTHON_VENV) -m pytest $(ARGS)

sanitize: ## the tests of native code with every read and write watched: about 10 minutes (ARGS=tests/differential/test_gemm.py for less)
	@scripts/setup.sh dev
	@scripts/env.sh scripts/sanitize.sh $(ARGS)

setup: ## environment, native build and model, for development
	@scripts/setup.sh dev

lint: ## ruff, mypy, clang-format: check only
	@scripts/setup.sh dev build
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/clang-format --dry-run --Werror $(NATIVE_SOURCES)
	.venv/bin/mypy

format: ## rewrite sources in the house format
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .
	.venv/bin/clang-format -i $(NATIVE_SOURCES)

oracle: ## derive the goldens again with transformers and llama.cpp, and compare (ARGS=--write replaces them); needs 2 GB for torch
	@test -f build/oracle/.stamp || { python3 -m venv build/oracle && build/oracle/bin/pip install --quiet -r benchmarks/oracle-requirements.txt && touch build/oracle/.stamp; }
	@PYTHONPATH=src:tests scripts/env.sh build/oracle/bin/python -P benchmarks/oracle.py $(ARGS)
	@test -f build/tokenizer-oracle/.stamp || { python3 -m venv build/tokenizer-oracle && build/tokenizer-oracle/bin/pip install --quiet -r benchmarks/tokenizer-oracle-requirements.txt && touch build/tokenizer-oracle/.stamp; }
	@PYTHONPATH=src:tests scripts/env.sh build/tokenizer-oracle/bin/python -P benchmarks/tokenizer_oracle.py $(ARGS)

evidence-numerics: ## native against float32 over the texts of benchmarks/texts, and against llama.cpp (about 15 minutes)
	@scripts/setup.sh dev
	@PYTHONPATH=tests scripts/env.sh $(PYTHON_VENV) benchmarks/numerics.py $(ARGS)

evidence-peers: ## Ropeway beside llama.cpp and OpenVINO, interleaved (about 105 minutes; ARGS="--rows c32" for less)
	@scripts/setup.sh dev
	@PYTHONPATH=tests scripts/env.sh $(PYTHON_VENV) benchmarks/peers.py $(ARGS)

evidence-kernels: ## every product as a share of the machine's limits, hot and cold, one thread and two (about 10 minutes)
	@scripts/setup.sh dev
	@scripts/env.sh $(PYTHON_VENV) benchmarks/kernels.py --record $(ARGS)

evidence-overheads: ## what Ropeway costs around its kernels: engine thread, lock, HTTP, busy core, start, memory (about 20 minutes)
	@scripts/setup.sh dev
	@scripts/env.sh $(PYTHON_VENV) benchmarks/overheads.py $(ARGS)

evidence-interference: ## gaps of running answers while long prompts stream in, 1, 8 and 32 running (a quarter of an hour; ARGS=--quick)
	@scripts/setup.sh dev
	@scripts/env.sh $(PYTHON_VENV) benchmarks/interference.py $(ARGS)

evidence-batching: ## continuous against static batching, same kernels and limits (under an hour; ARGS=--quick for less)
	@scripts/setup.sh dev
	@scripts/env.sh $(PYTHON_VENV) benchmarks/batching.py $(ARGS)

evidence-scheduler-cost: ## microseconds of a scheduling step and of a block, under every policy (about 5 minutes)
	@scripts/setup.sh dev
	@scripts/env.sh $(PYTHON_VENV) benchmarks/scheduler.py $(ARGS)

evidence-exhaustive: ## every state of three sequences and six blocks, under every policy and admission (about 15 minutes)
	@scripts/setup.sh dev
	@PYTHONPATH=tests scripts/env.sh $(PYTHON_VENV) benchmarks/scheduler_exhaustive.py $(ARGS)

evidence-scheduler-walk: ## five million random steps of the scheduler, checked at every one (under an hour; resumes)
	@scripts/setup.sh dev
	@PYTHONPATH=tests scripts/env.sh $(PYTHON_VENV) benchmarks/scheduler_walk.py $(ARGS)

evidence-fuzz: ## 100,000 fuzzed bodies to every POST endpoint: no 5xx, nothing left behind (under half an hour; resumes)
	@scripts/setup.sh dev
	@PYTHONPATH=tests scripts/env.sh $(PYTHON_VENV) benchmarks/fuzz_server.py $(ARGS)

evidence-lm-eval: ## lm-evaluation-harness against /v1/completions, its scores beside the engine's own (about 3 minutes; needs 800 MB, no torch)
	@scripts/setup.sh dev
	@test -f build/lm-eval/.stamp || { python3 -m venv build/lm-eval && build/lm-eval/bin/pip install --quiet -r benchmarks/lm-eval-requirements.txt && touch build/lm-eval/.stamp; }
	@PYTHONPATH=tests scripts/env.sh $(PYTHON_VENV) benchmarks/lm_eval_harness.py $(ARGS)

evidence-schemathesis: ## schemathesis against the OpenAPI document of a live server: no 5xx (about 10 minutes)
	@scripts/setup.sh dev
	@PYTHONPATH=tests scripts/env.sh $(PYTHON_VENV) benchmarks/schemathesis_run.py $(ARGS)

evidence-schemas: ## answers to every JSON schema of the tests, judged by jsonschema (about 2 minutes)
	@scripts/setup.sh dev
	@PYTHONPATH=tests scripts/env.sh $(PYTHON_VENV) benchmarks/schemas.py $(ARGS)

evidence-batch-kills: ## batches whose server is killed 210 times: the same answers as undisturbed (under an hour; resumes)
	@scripts/setup.sh dev
	@PYTHONPATH=tests scripts/env.sh $(PYTHON_VENV) benchmarks/batch_kills.py $(ARGS)

evidence-no-collapse: ## a pool for a quarter of the load, three admissions at every concurrency limit (virtual time, under 5 minutes; ARGS=--real: one point on a real server)
	@scripts/setup.sh dev
	@scripts/env.sh $(PYTHON_VENV) benchmarks/no_collapse.py $(ARGS)

evidence-fairness: ## one tenant floods, another asks seldom: time to first token under vtc and fcfs (virtual time, under 5 minutes; ARGS=--real: one point on a real server)
	@scripts/setup.sh dev
	@scripts/env.sh $(PYTHON_VENV) benchmarks/fairness.py $(ARGS)

evidence-slo: ## TPOT targets under load: windows held, refusals, throughput (virtual time, under 5 minutes; ARGS=--real: one point on a real server)
	@scripts/setup.sh dev
	@scripts/env.sh $(PYTHON_VENV) benchmarks/slo.py $(ARGS)

evidence-replay: ## an hour of mixed traffic, logged and replayed byte for byte (virtual time, under 5 minutes; ARGS=--real: one point on a real server)
	@scripts/setup.sh dev
	@scripts/env.sh $(PYTHON_VENV) benchmarks/replay_hour.py $(ARGS)

invariance: ## 200 random combinations of the scheduler's options on the default model: the same logits as alone (under 20 minutes; resumes)
	@scripts/setup.sh dev
	@PYTHONPATH=tests scripts/env.sh $(PYTHON_VENV) benchmarks/invariance.py $(ARGS)

evidence-bounds: ## 1,000 streams, 10,000 queued requests, slow and stopped clients on a tiny model (about 5 minutes)
	@scripts/setup.sh dev
	@PYTHONPATH=tests scripts/env.sh $(PYTHON_VENV) benchmarks/bounds.py $(ARGS)

evidence-soak: ## a server under random load, faults, pauses and key reloads, then at rest (about 15 minutes; ARGS="--duration 60" for less)
	@scripts/setup.sh dev
	@PYTHONPATH=tests scripts/env.sh $(PYTHON_VENV) benchmarks/soak.py $(ARGS)

evidence-side-effects: ## what schemas, log-probabilities and n=8 of one cost the others at 32 clients (about 6 minutes; resumes)
	@scripts/setup.sh dev
	@scripts/env.sh $(PYTHON_VENV) benchmarks/side_effects.py $(ARGS)

wheel: ## a wheel for any x86-64, in dist/
	@scripts/setup.sh dev build
	.venv/bin/python -m pip wheel --no-deps --no-build-isolation --wheel-dir dist .

clean: ## forget the environment and every build
	rm -rf .venv build dist
