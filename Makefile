# Everything from a clean clone: Python 3.11 or newer and make. `make help` lists what there is.
SHELL := /bin/bash
.DEFAULT_GOAL := help

# `python3` where it is new enough, else the newest of the others that runs.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# JAX 0.11 needs 3.12. What PATH has may not run, and pyenv has what isn't on PATH.
PYTHON_FOR_JAX_0_11 = $(shell for p in $(PYTHON) python3.12 python3.13 python3.14 "$$(pyenv root 2>/dev/null)"/versions/3.1[2-9]*/bin/python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && echo "$$p" && break; done)
# On a machine with an NVIDIA GPU: `make demo EXTRA=cuda12` or `EXTRA=cuda13`.
EXTRA ?=
ARGS ?=
# Python compiles what is imported when it is: half of an installation's time goes into compiling the rest.
PIP_FLAGS := --quiet --disable-pip-version-check --no-compile

# A group's tests share engines, and so stay in one process. In tests/conftest.py's order, the longest first, and not those with the most tests.
IN_PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder
comma := ,
BIN := .venv/bin
PARITY := .venv-parity/bin
AOT_0_10 := .venv-aot-jax-0.10/bin
AOT_0_11 := .venv-aot-jax-0.11/bin
GUIDELLM := .venv-guidellm/bin
RUN_STAMP := .venv/.installed$(if $(EXTRA),-$(EXTRA))
TEST_STAMP := .venv/.installed-test
RAY_STAMP := .venv/.installed-ray
PARITY_STAMP := .venv-parity/.installed
AOT_0_10_STAMP := .venv-aot-jax-0.10/.installed
AOT_0_11_STAMP := .venv-aot-jax-0.11/.installed
GUIDELLM_STAMP := .venv-guidellm/.installed
# Tests start a hundred processes: with bytecode each imports in 4 s, without in 10. It lies beside the packages, also for who wants none in the tree.
test test-exhaustive test-parity test-processes test-aot test-ray test-fences test-measured: export PYTHONPYCACHEPREFIX := $(CURDIR)/.venv/bytecode
test test-exhaustive test-parity test-processes test-aot test-ray test-fences test-measured: export PYTHONDONTWRITEBYTECODE :=
# Set, if to nothing, it keeps tests/conftest.py from having XLA compile more quickly than for users.
test-parity test-measured: export XLA_FLAGS := $(XLA_FLAGS)
# All of them, unless ARGS name some.
AOT_TESTS = $(if $(filter tests/%,$(ARGS)),,tests/aot)
CHECKED := jaxinfer pallas_kernels sharding checkpoints server tests benchmarks examples

.PHONY: help demo serve test test-exhaustive test-mutations check fix golden test-parity test-processes test-ray test-aot aot-venvs test-fences test-measured bench replay soak chaos clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(RUN_STAMP) ## answer a prompt with the default model, then say what ran where and how fast
	@$(BIN)/jaxinfer demo $(ARGS)

serve: $(RUN_STAMP) ## OpenAI-compatible server and chat page on http://127.0.0.1:8000 (ARGS="--port 9000 ...")
	@$(BIN)/jaxinfer serve $(ARGS)

test: $(TEST_STAMP) ## the test suite (ARGS="-k name" ...)
	@$(BIN)/python -m pytest -q $(IN_PARALLEL) --durations=10 $(ARGS)

test-exhaustive: $(TEST_STAMP) ## the same with every case of every matrix, before a release (docs/testing.md)
	@$(BIN)/python -m pytest -q $(IN_PARALLEL) --durations=10 -m 'not parity and not aot and not ray and not measured' $(ARGS)

test-mutations: $(TEST_STAMP) ## put the faults of tests/mutations.md into a copy, one after the other: the suite finds each (ARGS="3 17": some)
	@$(BIN)/python -m tests.mutations $(ARGS)

check: $(TEST_STAMP) ## format, lint and types, changing nothing
	@$(BIN)/ruff format --check --quiet $(CHECKED) || { echo 'Not formatted: run `make fix`.'; exit 1; }
	@$(BIN)/ruff check --quiet $(CHECKED)
	@$(BIN)/mypy --no-error-summary
	@echo "format, lint and types: ok"

fix: $(TEST_STAMP) ## format, and mend what the linter can mend
	@$(BIN)/ruff check --quiet --fix $(CHECKED) || true
	@$(BIN)/ruff format $(CHECKED)

test-parity: $(PARITY_STAMP) ## compare live with torch and transformers, in a venv of their own (ARGS="-m parity": every case)
	@$(PARITY)/python -m pytest -q --durations=10 -m 'parity and not exhaustive' $(ARGS)

# pytest's 5: there is no such test for these cards. Where ARGS ask for some, other cards may have them; where they don't, there must be one.
test-aot: aot-venvs ## compile kernels and whole programs for GPUs that are not here, by JAX 0.11 and 0.10, in venvs of their own (ARGS="-m aot": every case, about an hour)
	@run() { \
		for cards in $$3; do \
			echo "$$2 list, $$cards, $$($$1/python -c 'import jax, platform as p; print("JAX", jax.__version__, "on Python", p.python_version())'):"; \
			AOT_LIST=$$2 AOT_CARDS=$$cards JAX_PLATFORMS=cpu $$1/python -m pytest -q -m 'aot and not exhaustive' $(AOT_TESTS) $(ARGS); \
			case $$? in 0) some=yes;; 5) $(if $(ARGS),,exit 1);; *) exit 1;; esac; \
		done; \
	}; \
	if [ -n '$(PYTHON_FOR_JAX_0_11)' ]; then \
		run $(AOT_0_11) main "hopper blackwell small"; run $(AOT_0_10) short "$(if $(ARGS),hopper blackwell small,hopper small)"; \
	else \
		run $(AOT_0_10) main "hopper blackwell small"; echo "JAX 0.11 was left out, for there is no Python 3.12 or newer"; \
	fi; \
	[ -n "$$some" ]

aot-venvs: $(AOT_0_10_STAMP)
	@$(if $(PYTHON_FOR_JAX_0_11),$(MAKE) -s --no-print-directory PYTHON=$(PYTHON_FOR_JAX_0_11) $(AOT_0_11_STAMP),\
		echo "JAX 0.11 is left out, for there is no Python 3.12 or newer. Give one: make test-aot PYTHON=/path/to/python3.12")

test-fences: $(AOT_0_10_STAMP) ## take fences and barriers out of the compiled kernels, and count which of these faults the PTX emulator finds: twenty minutes
	@for cards in hopper blackwell; do AOT_CARDS=$$cards JAX_PLATFORMS=cpu $(AOT_0_10)/python -m tests.ptx.mutations $(ARGS) || exit 1; done

test-processes: $(TEST_STAMP) ## servers, workers and scripts as processes of their own, killed, stopped and interrupted
	@$(BIN)/python -m pytest -q --durations=10 -m 'processes and not exhaustive' $(ARGS)

test-ray: $(RAY_STAMP) ## pools of workers on a Ray of this machine, which is installed for it
	@$(BIN)/python -m pytest -q -m ray tests/server/cluster $(ARGS)

test-measured: $(TEST_STAMP) ## calibrate and hold predicted step times against measured ones: minutes, alone on the machine
	@$(BIN)/python -m pytest -q -s -m measured $(ARGS)

golden: $(PARITY_STAMP) ## write the reference implementation's results anew to tests/golden/
	@$(PARITY)/python -m tests.golden.write $(ARGS)

bench: $(TEST_STAMP) ## this engine beside transformers, llama.cpp and vLLM on this machine, one run (ARGS="--quick": a look)
	@$(BIN)/python -m benchmarks.peers $(ARGS)

replay: $(TEST_STAMP) $(GUIDELLM_STAMP) ## a service's trace against this server (TRACE=file, in the format of Mooncake's traces)
	@test -n "$(TRACE)" || { echo "Give a trace: make replay TRACE=conversation_trace.jsonl (docs/load_tests.md says where there is one)."; exit 1; }
	@$(BIN)/python -m benchmarks.replay --serve --trace "$(TRACE)" $(ARGS)

soak: $(TEST_STAMP) ## overload, aborts, bad requests: what must hold (ARGS="--minutes 10")
	@$(BIN)/python -m benchmarks.soak $(ARGS)

chaos: $(TEST_STAMP) ## routers and workers that are killed and stopped at random under load (ARGS="--minutes 10 --seed 1")
	@$(BIN)/python -m tests.server.workers.chaos $(ARGS)

clean: ## remove the virtual environments and what tools left (model and compilation caches stay)
	rm -rf .venv .venv-parity .venv-aot .venv-aot-jax-0.10 .venv-aot-jax-0.11 .venv-guidellm .venv-llama-cpp .venv-vllm build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .schemathesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

%/bin/python:
	@test -n "$(PYTHON)" || { echo "jaxinfer needs Python 3.11 or newer; none was found. Give one: make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "creating $* with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $* || { echo "$(PYTHON) can't make a virtual environment; on Debian or Ubuntu install python3-venv."; rm -rf $*; exit 1; }

# A stamp is newer than pyproject.toml where its extras are installed as it says.
$(RUN_STAMP): pyproject.toml | $(BIN)/python
	@echo "installing jaxinfer into .venv (a minute or two, once)"
	@$(BIN)/python -m pip install $(PIP_FLAGS) --editable '.$(if $(EXTRA),[$(EXTRA)])'
	@touch $@

$(TEST_STAMP): pyproject.toml | $(BIN)/python
	@echo "installing jaxinfer and its test tools into .venv (a minute or two, once)"
	@$(BIN)/python -m pip install $(PIP_FLAGS) --editable '.[test$(if $(EXTRA),$(comma)$(EXTRA))]'
	@touch $@ $(RUN_STAMP)

$(RAY_STAMP): $(TEST_STAMP)
	@echo "installing Ray into .venv (once)"
	@$(BIN)/python -m pip install $(PIP_FLAGS) --editable '.[test,cluster]'
	@touch $(TEST_STAMP) $@

$(PARITY_STAMP): pyproject.toml | $(PARITY)/python
	@echo "installing jaxinfer, torch and transformers into .venv-parity (some minutes, once)"
	@$(PARITY)/python -m pip install $(PIP_FLAGS) --editable '.[test,parity]'
	@touch $@

# Each with JAX's compiler for NVIDIA GPUs in that version.
aot_install = @echo "installing jaxinfer and JAX's compiler for NVIDIA GPUs into $(@D) (a minute or two, once)"; \
	$(@D)/bin/python -m pip install $(PIP_FLAGS) --editable '.[aot]' $(foreach p,jax jax-cuda13-plugin jax-cuda13-pjrt,'$p$(1)') && touch $@

$(AOT_0_10_STAMP): pyproject.toml | $(AOT_0_10)/python
	$(call aot_install,<0.11)

$(AOT_0_11_STAMP): pyproject.toml | $(AOT_0_11)/python
	$(call aot_install,>=0.11)

# torch as for parity: without its GPU parts where the index has such a build. Without guidellm a replay says that it is absent.
$(GUIDELLM_STAMP): | $(GUIDELLM)/python
	@echo "installing guidellm into .venv-guidellm (some minutes, once)"
	@$(GUIDELLM)/python -m pip install $(PIP_FLAGS) 'guidellm>=0.8,<0.9' 'torch==2.13.0' \
		&& touch $@ || echo "guidellm can't be installed here"
