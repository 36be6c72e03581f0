# Everything from a bare machine: each target installs what it needs (as root), configures, builds and runs.
#   make demo              train a transformer on 2x2 thread ranks, and see who holds what
#   make test              all tests;  TORCH=2.13.0 takes that libtorch from PyPI, TORCH=debian Debian's
#   make test-core         core alone, without libtorch
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

TORCH ?=
JOBS ?= $(shell nproc)
export TORCH TORCH_DIR CMAKE_PREFIX_PATH

# Finds libtorch and sets $$prefix, $$version, $$build for the rest of a recipe.
define find_torch
found=$$(bash cmake/find_torch.sh); read -r prefix version source <<<"$$found"; \
build=build/torch-$$version; echo "-- libtorch $$version ($$source: $$prefix)"
endef

.PHONY: help demo test test-core build asan tsan fuzz bench bench-runtime bench-train bench-checkpoint opdb audit chains lint format api clean
help:
	@sed -n 's/^#   //p' Makefile; echo 'Others: build asan tsan fuzz bench bench-runtime bench-train bench-checkpoint opdb audit chains lint format api clean'

build:
	@bash cmake/setup.sh core comm
	@$(find_torch); cmake -S . -B $$build -G Ninja -DTorch_DIR=$$prefix $(CMAKE_ARGS); cmake --build $$build -j $(JOBS)

demo:
	@bash cmake/setup.sh core comm
	@$(find_torch); cmake -S . -B $$build -G Ninja -DTorch_DIR=$$prefix >/dev/null; \
	cmake --build $$build -j $(JOBS) --target dtensor_tool dtensor_train; bash tools/demo.sh $$build/tools/dtensor

test: build
	@$(find_torch); ctest --test-dir $$build -j $(JOBS) --output-on-failure

test-core:
	@bash cmake/setup.sh core
	@cmake --preset core $(CMAKE_ARGS); cmake --build --preset core -j $(JOBS); ctest --preset core -j $(JOBS)

# Core, then ranks that are threads on libtorch, which is not itself instrumented; what is ours around it is.
SANITIZED := threads reduce fingerprint
asan tsan:
	@bash cmake/setup.sh core
	@cmake --preset $@ -DDTENSOR_TORCH=OFF; cmake --build --preset $@ -j $(JOBS); ctest --preset $@ -j $(JOBS)
	@$(find_torch); cmake --preset $@ -DDTENSOR_TORCH=ON -DTorch_DIR=$$prefix; \
	cmake --build --preset $@ -j $(JOBS) --target $(SANITIZED:%=test_comm_%); \
	for name in $(SANITIZED); do build/$@/tests/comm/test_comm_$$name --gtest_brief=1; done

# What reads bytes from outside under libFuzzer, for so long in all, each with its corpus.
FUZZ_SECONDS ?= 60
fuzz:
	@bash cmake/setup.sh core fuzz
	@cmake -S . -B build/fuzz -G Ninja -DCMAKE_CXX_COMPILER=clang++ -DDTENSOR_TORCH=OFF -DDTENSOR_FUZZ=ON \
	  -DDTENSOR_TOOLS=OFF -DDTENSOR_WERROR=ON -DDTENSOR_SANITIZE=address,undefined \
	  -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_FLAGS_RELWITHDEBINFO='-O1 -g1'; \
	cmake --build build/fuzz -j $(JOBS) --target fuzz_text fuzz_rendezvous fuzz_checkpoint; \
	for target in core:fuzz_text comm:fuzz_rendezvous checkpoint:fuzz_checkpoint; do \
	  folder=$${target%%:*}; name=$${target##*:}; program=$$(find build/fuzz/tests -name $$name -type f); \
	  mkdir -p build/fuzz/corpus-$$folder; \
	  $$program -max_total_time=$$(( $(FUZZ_SECONDS) / 3 )) -print_final_stats=1 -timeout=10 -rss_limit_mb=2048 \
	    -artifact_prefix=build/fuzz/ build/fuzz/corpus-$$folder tests/$$folder/corpus; done

bench:
	@bash cmake/setup.sh core bench
	@cmake -S . -B build/bench -G Ninja -DCMAKE_BUILD_TYPE=Release -DDTENSOR_TORCH=OFF -DDTENSOR_BENCH=ON; \
	cmake --build build/bench -j $(JOBS) --target bench_core bench_plan; \
	for name in core plan; do build/bench/bench/bench_$$name; done

# What calls and redistributions cost beside plain ones; upstream's DTensor too, where the libtorch is a Python one.
bench-runtime:
	@bash cmake/setup.sh core comm bench
	@$(find_torch); cmake -S . -B $$build -G Ninja -DTorch_DIR=$$prefix -DDTENSOR_BENCH=ON; \
	cmake --build $$build -j $(JOBS) --target bench_dispatch bench_redistribute bench_random; \
	for name in dispatch redistribute random; do $$build/bench/runtime/bench_$$name; done; \
	python=$${prefix%/lib/python3*}/bin/python3; if [ -x "$$python" ]; then "$$python" bench/runtime/upstream.py; fi

# Training beside plain libtorch; upstream's DTensor and FSDP2 too, where the libtorch is a Python one.
bench-train:
	@bash cmake/setup.sh core comm bench
	@$(find_torch); cmake -S . -B $$build -G Ninja -DTorch_DIR=$$prefix -DDTENSOR_BENCH=ON; \
	cmake --build $$build -j $(JOBS) --target bench_train; \
	python=$${prefix%/lib/python3*}/bin/python3; if [ -x "$$python" ]; then beside="$$python bench/train/upstream.py"; fi; \
	$$build/bench/train/bench_train 15 $$beside

# Planning, saving and loading checkpoints, beside dd and memcpy; 2 GB in BENCH_FOLDER.
BENCH_FOLDER ?= $(or $(TMPDIR),/tmp)
bench-checkpoint:
	@bash cmake/setup.sh core comm bench
	@$(find_torch); cmake -S . -B $$build -G Ninja -DTorch_DIR=$$prefix -DDTENSOR_BENCH=ON >/dev/null; \
	cmake --build $$build -j $(JOBS) --target bench_checkpoint_plan bench_checkpoint; \
	$$build/bench/checkpoint/bench_checkpoint_plan; $$build/bench/checkpoint/bench_checkpoint $(BENCH_FOLDER)

# All of PyTorch's operator database on distributed tensors; OPDB='--op add --mesh 4' runs a part (tests/opdb/run.py --help).
OPDB ?=
opdb: export TORCH := $(or $(TORCH),2.13.0)
opdb:
	@bash cmake/setup.sh core comm python
	@$(find_torch); cmake -S . -B $$build -G Ninja -DTorch_DIR=$$prefix $(CMAKE_ARGS) >/dev/null; \
	cmake --build $$build -j $(JOBS) --target dtensor_python; \
	PYTHONPATH=$$build/python:$${PYTHONPATH:-} "$${prefix%/lib/python3*}/bin/python3" tests/opdb/run.py \
	  --jobs $(JOBS) --out $$build/opdb.json $(OPDB)

# Every rule against its operator on many layouts; DTENSOR_AUDIT=aten::mm looks at one.
AUDIT_LAYOUTS ?= 400
audit:
	@bash cmake/setup.sh core comm
	@$(find_torch); cmake -S . -B $$build -G Ninja -DTorch_DIR=$$prefix $(CMAKE_ARGS) >/dev/null; \
	cmake --build $$build -j $(JOBS) --target audit_test; \
	DTENSOR_AUDIT_LAYOUTS=$(AUDIT_LAYOUTS) $$build/tests/testing/audit_test

# Random chains of operators against the plain run; `DTENSOR_CHAIN=123 make chains` plays one and prints it.
SEEDS ?= 10000
chains:
	@bash cmake/setup.sh core comm
	@$(find_torch); cmake -S . -B $$build -G Ninja -DTorch_DIR=$$prefix $(CMAKE_ARGS) >/dev/null; \
	cmake --build $$build -j $(JOBS) --target chains_test; DTENSOR_CHAINS=$(SEEDS) $$build/tests/testing/chains_test

lint:
	@bash cmake/setup.sh lint
	@bash cmake/lint.sh

format:
	@bash cmake/setup.sh lint
	@git ls-files --cached --others --exclude-standard '*.h' '*.cpp' | xargs ls 2>/dev/null | xargs clang-format -i

# The API reference, from the headers.
api:
	@bash cmake/api_reference.sh > docs/api.md

clean:
	@rm -rf build
