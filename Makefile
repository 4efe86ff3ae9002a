# Everything a fresh clone needs is python3 (3.11 to 3.13), pip and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Bytecode is kept, also where the shell says not to: hundreds of processes import the code.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest
# Three workers for two cores, since tests that wait for processes leave cores idle. A
# worker that has finished its share takes tests from others.
SIDE_BY_SIDE := -n 3 --dist worksteal
BENCHMARKS := training_vs_bare_torch overhead personalize_vs_bare server_memory_ratio \
  million_clients store real_round_s idle_sites service_latency service_membership data_carrier \
  site_leakage secure_aggregation
# Not of `make bench`: peers installs other frameworks, each in a folder below build/peers,
# private_answers needs a pretrained network, and audits prints a table.
BENCHMARKS_ALONE := peers private_answers audits
# IMAGES is a folder of images to use instead of random ones; ARGS is for one benchmark.
BENCHMARK = $(BIN)/python -m benchmarks.$(1) $(if $(IMAGES),--images '$(IMAGES)')

# How older processors compute: what torch, oneDNN, MKL, OpenBLAS and FAISS choose there.
KERNELS := avx2 sse4 one_thread
KERNELS_avx2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 \
  MKL_ENABLE_INSTRUCTIONS=AVX2 OPENBLAS_CORETYPE=Haswell FAISS_SIMD_LEVEL=AVX2
KERNELS_sse4 := ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 \
  MKL_ENABLE_INSTRUCTIONS=SSE4_2 OPENBLAS_CORETYPE=Nehalem FAISS_SIMD_LEVEL=NONE
KERNELS_one_thread := OMP_NUM_THREADS=1 MKL_CBWR=COMPATIBLE
FOLDER ?= .golden
# The tests whose numbers come from kernels; TESTS= is all fast ones.
TESTS := tests/strategies tests/datastore tests/client tests/apps tests/models \
  tests/simulation/test_trained_model.py

.PHONY: help install demo figures test test-integration test-kernels test-slow test-gpu coverage check format docs release docker-try bench clean
.PHONY: golden golden-freeze
.PHONY: $(BENCHMARKS:%=bench-%) $(BENCHMARKS_ALONE:%=bench-%)
help: ## Show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

install: $(STAMP) ## Create .venv with the tested versions (done by every target)

# Progress is what pip has fetched or put in place: rewritten on a terminal, a line every 15
# seconds elsewhere. All that pip says is in the log, and shown if it fails.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else "Python 3.11, 3.12 or 3.13 is needed, found %d.%d; name one with make PYTHON=python3.11" % v)'
	@echo "Creating the environment $(VENV) with $$($(PYTHON) --version)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing the $$(grep -c == constraints.txt) packages of constraints.txt: 2.5 GB on the disk, more with"
	@echo "torch's CUDA libraries. Two to ten minutes; pip's own words are in $(VENV)/install.log"
	@$(BIN)/python -m pip install --progress-bar off --no-input --disable-pip-version-check \
	  -c constraints.txt -e '.[dev]' >$(VENV)/install.log 2>&1 & pip=$$!; \
	trap "kill $$pip; wait $$pip; exit 130" INT TERM; seconds=0; \
	while sleep 1; kill -0 $$pip 2>/dev/null; do \
	  seconds=$$((seconds + 1)); \
	  fetched=$$(grep -Ec '^(Collecting|Processing)' $(VENV)/install.log); \
	  there=$$(ls -d $(VENV)/lib/python*/site-packages/*.dist-info 2>/dev/null | grep -c .); \
	  told="  $$seconds s: $$fetched packages fetched, $$there in place"; \
	  if [ -t 1 ]; then printf '\r%s ' "$$told"; \
	  elif [ $$((seconds % 15)) -eq 0 ]; then echo "$$told"; fi; \
	done; \
	if [ -t 1 ]; then echo; fi; \
	wait $$pip || { tail -n 25 $(VENV)/install.log; echo "pip failed; all that it said is in $(VENV)/install.log"; exit 1; }
	@touch $@
	@echo "Installed into $(VENV). To use it in this shell: source $(BIN)/activate"

demo: $(STAMP) ## Run the main job on real handwriting: twenty seconds
	$(BIN)/knnper simulate demo --output runs/demo --overwrite
	@$(BIN)/knnper report runs/demo --html runs/demo/report.html >/dev/null

# Without data/cifar10 those on its images are left out, and the report says so.
figures: $(STAMP) ## Make the papers' figures in small, with one report: in 40 minutes
	$(BIN)/python -m papers reproduce papers/small/*.yaml --output runs/figures --skip-missing-data

test: $(STAMP) ## Run the fast tests
	$(PYTEST) $(SIDE_BY_SIDE)

test-kernels: $(STAMP) ## Test with the kernels of older processors: KERNELS=avx2 TESTS=
	$(foreach name,$(KERNELS),$(if $(KERNELS_$(name)),,$(error KERNELS: found $(name), expected some of avx2 sse4 one_thread)))
	@set -e$(foreach name,$(KERNELS),; (set -x; env $(KERNELS_$(name)) $(PYTEST) $(SIDE_BY_SIDE) -m 'not slow and not gpu' $(TESTS)))

test-integration: $(STAMP) ## Run the tests that train, draw or start processes: six minutes
	$(PYTEST) $(SIDE_BY_SIDE) -m 'integration and not slow and not gpu'

test-slow: $(STAMP) ## Run the slow tests too: kill -9 of runs and stores, flwr run, real data
	$(PYTEST) -m slow

# Subprocesses count too. The fast tests alone: `make test-slow` covers more.
coverage: $(STAMP) ## Measure what the fast tests cover: build/coverage/index.html
	$(PYTEST) $(SIDE_BY_SIDE) --cov --cov-report=term:skip-covered --cov-report=html:build/coverage

test-gpu: $(STAMP) ## Run the tests that need a GPU, which all others do without
	$(PYTEST) -m gpu

check: $(STAMP) ## Format, lint, types, import layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	MYPYPATH=docker $(BIN)/mypy --explicit-package-bases docker/try.py docker/health.py
	$(BIN)/lint-imports

format: $(STAMP) ## Rewrite the code in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(STAMP) ## Build the documentation, its reference made from the code: build/site
	$(BIN)/python -m mkdocs build --strict --quiet
	@echo "Open build/site/index.html"

release: $(STAMP) ## Build dist/ of a version that the changelog dates, and print how to tag it
	PYTHON=$(BIN)/python .ci/release

docker-try: $(STAMP) ## Try the images: a federation in containers, in ten minutes
	$(BIN)/python docker/try.py

bench: $(STAMP) ## Measure speed and memory, lines of JSON, in 20 minutes
	@set -e; for name in $(BENCHMARKS); do $(call BENCHMARK,$$name); done

$(BENCHMARKS:%=bench-%) $(BENCHMARKS_ALONE:%=bench-%): bench-%: $(STAMP)
	@$(call BENCHMARK,$*) $(ARGS)

golden-freeze: $(STAMP) ## Keep the numbers of tiny runs of every method: FOLDER=.golden
	$(BIN)/python -m benchmarks.golden freeze $(FOLDER) $(ARGS)

golden: $(STAMP) ## Compare with the kept numbers: FOLDER=.golden ARGS=--all
	$(BIN)/python -m benchmarks.golden compare $(FOLDER) $(ARGS)

clean: ## Remove the environment and caches (runs are kept)
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache *.egg-info
