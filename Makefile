# The verbs that people, hooks and CI call. Each sets up what it needs: a virtual environment in .venv, the tools, and
# the extension built in release mode. Needed beforehand: Python 3.10 or newer, a Rust toolchain, make.

PYTHON ?= python3
CARGO ?= cargo
FUZZ_SECONDS ?= 20
BENCH_ARGS ?=
# The last two parts of make bench take two hours in full: TRANSPORT_ARGS= SCALE_ARGS=
TRANSPORT_ARGS ?= --quick
SCALE_ARGS ?= --quick
ABORTS_ARGS ?=
TEST_ARGS ?=
# Processes that run Python tests side by side; many tests wait for servers, so two cores are worth four.
TEST_JOBS ?= 4
# Processes that compute beside the tests in make soak.
BUSY ?= 10

# The benchmarks' server is a workspace of its own; benches/server.py builds it to the same place.
BENCH_SERVER_ARGS := --release --locked --manifest-path benches/server/Cargo.toml --target-dir target/bench-server
BENCH_SERVER := target/bench-server/release/bench-server
# So is the comparison with other JSON parsers; benches/instructions.py builds to the same place.
BENCH_PARSERS_ARGS := --locked --manifest-path benches/parsers/Cargo.toml --target-dir target/bench-parsers

VENV := .venv
BIN := $(VENV)/bin
TOOLS := $(VENV)/.tools
BUILT := $(VENV)/.built
TORCH := $(VENV)/.torch

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# The verbs share one environment and one target directory: never two at once, whatever -j says.
.NOTPARALLEL:

# maturin installs into the environment that is named here, whichever one the caller has activated.
export VIRTUAL_ENV := $(CURDIR)/$(VENV)
unexport CONDA_PREFIX PYTHONHOME PYTHONPATH
# Each worker of pytest, and each interpreter that a test starts, would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-torch test-lowest lint docs check bench soak fuzz wheel develop clean FORCE

help:  ## Print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(BUILT)  ## Two rollouts on two loopback engines: abort, keep, resume; checks that no token is lost
	$(BIN)/streamfold demo

test: $(BUILT) $(BENCH_SERVER)  ## Run the Rust and Python tests (without torch and ray)
	@if $(CARGO) nextest --version >/dev/null 2>&1; then \
	  $(CARGO) nextest run --workspace --locked; \
	else \
	  $(CARGO) test --workspace --locked --all-targets; \
	fi
	$(CARGO) test --workspace --locked --doc
	$(CARGO) test --quiet $(BENCH_SERVER_ARGS)
	$(BIN)/pytest -n $(TEST_JOBS) --dist worksteal -m "not torch and not ray" $(TEST_ARGS)

test-torch: $(TORCH)  ## Run the tests that need torch or ray, after installing them (a download of up to 3 GB, once)
	$(BIN)/pytest -m "torch or ray" $(TEST_ARGS)

# Not the whole suite: what a requirement that is too old would break.
LOWEST_TESTS ?= tests/cli tests/client/test_client.py tests/client/test_requests.py tests/client/test_network.py \
  tests/loopback/test_generate.py tests/loopback/test_router.py tests/samples/test_sample.py tests/rollout/test_buffer.py
LOWEST := target/lowest

test-lowest: $(BUILT)  ## Run the command line's tests and some others with the lowest versions that pyproject.toml allows
	rm -rf $(LOWEST)
	$(PYTHON) -m venv $(LOWEST)
	$(BIN)/python tests/support/lowest.py >target/lowest.txt
	$(LOWEST)/bin/python -m pip install --quiet --requirement target/lowest.txt
	PYTHONPATH=$(CURDIR)/python $(LOWEST)/bin/python -m pytest -n $(TEST_JOBS) $(LOWEST_TESTS) $(TEST_ARGS)

lint: $(BUILT)  ## Check formats, lints, types, import layers, complexity, and the stub against the compiled module
	$(CARGO) fmt --all --check
	$(CARGO) fmt --manifest-path rust/fuzz/Cargo.toml --check
	$(CARGO) fmt --manifest-path benches/server/Cargo.toml --check
	$(CARGO) fmt --manifest-path benches/parsers/Cargo.toml --check
	$(CARGO) clippy --workspace --all-targets --locked -- --deny warnings
	$(CARGO) clippy $(BENCH_SERVER_ARGS) --all-targets -- --deny warnings
	$(CARGO) clippy $(BENCH_PARSERS_ARGS) --all-targets -- --deny warnings
	RUSTDOCFLAGS="--deny warnings" $(CARGO) doc --workspace --no-deps --locked
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest streamfold._core --mypy-config-file pyproject.toml
	$(BIN)/lint-imports
	$(BIN)/radon cc --json python/streamfold | $(BIN)/python tests/support/complexity.py
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pyright --verifytypes streamfold --ignoreexternal >target/verifytypes.txt || \
	  { cat target/verifytypes.txt; exit 1; }

# The notice of mkdocs-material about its own successor is none of this build's warnings.
docs: $(BUILT)  ## Build the documentation into target/site; any warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --clean --site-dir $(CURDIR)/target/site

check: lint test test-torch docs  ## Everything that a change must pass

bench: $(BUILT) $(BENCH_SERVER)  ## Measure against what people run today, and write benches/RESULTS.md (about half an hour)
	mkdir -p target
	$(BIN)/pytest benches/bench_*.py --timeout 900 --benchmark-quiet --benchmark-json target/bench.json $(BENCH_ARGS)
	$(BIN)/python -m benches.transport --out target/transport.md $(TRANSPORT_ARGS)
	$(BIN)/python -m benches.scale --out target/scale.md $(SCALE_ARGS)
	$(BIN)/python -m benches.abort_storm --out target/aborts.md $(ABORTS_ARGS)
	$(BIN)/python -m benches.report target/bench.json target/transport.md target/scale.md target/aborts.md \
	  benches/aims.md >target/RESULTS.md
	mv target/RESULTS.md benches/RESULTS.md
	cat benches/RESULTS.md
	$(CARGO) bench $(BENCH_PARSERS_ARGS)
	$(BIN)/python -m benches.experts
	$(BIN)/python -m benches.instructions

soak: $(BUILT) $(BENCH_SERVER)  ## Run the tests at their full counts, and the usual ones on a busy machine (hours)
	PROPTEST_CASES=20000 $(CARGO) test --workspace --locked --release
	STREAMFOLD_SOAK=1 $(BIN)/pytest --timeout 3600 $(TEST_ARGS)
	$(BIN)/python tests/support/busy.py $(BUSY) $(BIN)/pytest -n $(TEST_JOBS) --dist worksteal --timeout 900 $(TEST_ARGS)

# Coverage guidance on a stable toolchain: LLVM's own pass counts the edges, and libFuzzer finds the counters at link
# time. No sanitizer, as the core forbids unsafe code. The explicit target keeps the flags away from build scripts.
FUZZ_FLAGS := --cfg fuzzing -C codegen-units=1 -C passes=sancov-module \
  -C llvm-args=-sanitizer-coverage-level=4 -C llvm-args=-sanitizer-coverage-inline-8bit-counters \
  -C llvm-args=-sanitizer-coverage-pc-table -C llvm-args=-sanitizer-coverage-trace-compares

fuzz:  ## Fuzz the parser and the HTTP exchange, FUZZ_SECONDS=20 for each target (needs a C++ compiler)
	@cd rust/fuzz; \
	host=$$(rustc -vV | sed -n 's/^host: //p'); \
	RUSTFLAGS="$(FUZZ_FLAGS)" $(CARGO) build --release --locked --target "$$host"; \
	for target in parse split exchange; do \
	  echo "$$target: $(FUZZ_SECONDS) s"; \
	  mkdir -p "corpus/$$target" "artifacts/$$target"; \
	  "target/$$host/release/$$target" "corpus/$$target" ../../tests/data -artifact_prefix="artifacts/$$target/" \
	    -max_total_time=$(FUZZ_SECONDS) -max_len=8192 -timeout=10 -rss_limit_mb=2048 \
	    -verbosity=0 -print_funcs=0 -print_final_stats=1 2>&1 | grep -v '# Uses:\|ecommended dictionary'; \
	done

wheel: $(TOOLS)  ## Build the sdist, the abi3 wheel from it, and import that in an empty environment
	rm -rf dist target/empty
	$(BIN)/maturin build --release --sdist --out dist
	! $(BIN)/python -m zipfile --list dist/*.whl | grep -E '(^|/)(tests|benches)/|conftest|\.rs ' \
	  || { echo "the wheel holds files that are not for users (above)"; exit 1; }
	$(PYTHON) -m venv target/empty
	target/empty/bin/python -m pip install --quiet dist/*.whl
	cd target; empty/bin/python -c 'import streamfold; print("streamfold", streamfold.__version__, "works from its wheel")'
	cd target; empty/bin/streamfold --help >/dev/null

develop: $(BUILT)  ## Set up .venv and build the extension into python/streamfold

clean:  ## Remove the environment and everything built
	rm -rf $(VENV) target dist rust/fuzz/target python/streamfold/_core*.so .hypothesis .mypy_cache .ruff_cache
	find python tests benches examples -name __pycache__ -prune -exec rm -rf {} +

$(TOOLS): pyproject.toml
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("streamfold needs Python 3.10 or newer: make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"  # the first that knows dependency groups
	$(BIN)/python -m pip install --quiet --group dev
	touch $@

RUST_SOURCES := Cargo.toml Cargo.lock $(shell find rust/core rust/io rust/py -name Cargo.toml -o -path '*/src*')
# The extension may vanish (git clean) while the environment stays.
$(BUILT): $(TOOLS) $(RUST_SOURCES) $(if $(wildcard python/streamfold/_core*.so),,FORCE)
	command -v $(CARGO) >/dev/null || { echo "streamfold needs a Rust toolchain: install one with rustup"; exit 1; }
	PIP_QUIET=1 $(BIN)/maturin develop --release --extras loopback
	touch $@

$(BENCH_SERVER): benches/server/Cargo.toml benches/server/Cargo.lock $(wildcard benches/server/src/*.rs)
	$(CARGO) build --quiet $(BENCH_SERVER_ARGS)
	touch $@

$(TORCH): $(BUILT)
	@echo "Installing torch, transformers and ray, where missing: on Linux x86-64 a download of about 3 GB (6 GB on"
	@echo "disk), five minutes at 100 Mbit/s; elsewhere 150 MB. What is installed already is kept, and takes seconds."
	@echo "To take a smaller build, set pip's own variables, as in PIP_EXTRA_INDEX_URL."
	$(BIN)/maturin develop --release --extras loopback,hf,ray,torch,train || { \
	  echo "torch or ray could not be installed (above); all other tests run without it: make test"; exit 1; }
	touch $@

FORCE:
