# Everything here works on a fresh machine with Python >= 3.10, gcc and make.
PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/
READY := $(VENV)/.ready
TESTS ?= tests
# Processes that the tests run in.
JOBS ?= 2

.PHONY: demo test test-all test-gpu lint bench bench-allocator bench-interop bench-optimizer bench-pipeline bench-plan \
  bench-ablation bench-bandwidth bench-dha bench-machines bench-scale bench-scale-8 clean

demo: $(READY)  ## the main job: train a small language model through a third of its weights' memory
	$(RUN)memferry train --preset tiny --steps 12 --verify

test: $(READY)  ## what every change must pass; at most 10 minutes on 2 cores
	$(RUN)python -m pytest $(TESTS) -q -n $(JOBS) -m "not gpu and not slow"

test-all: $(READY)  ## the same and what takes longer
	$(RUN)python -m pytest $(TESTS) -q -n $(JOBS) -m "not gpu"

test-gpu:  ## needs a CUDA device, and a Python with torch for it: make test-gpu VENV=path
	$(RUN)python -m pytest $(TESTS) -q -m "gpu"

lint: $(READY)
	$(RUN)ruff check .
	$(RUN)ruff format --check .
	$(RUN)mypy
	$(RUN)lint-imports

bench: bench-pipeline  ## needs a CUDA device, as those below

bench-allocator:
	$(RUN)python -m benchmarks.allocator
	$(RUN)python -m benchmarks.tables

bench-interop:
	$(RUN)python -m benchmarks.interop
	$(RUN)python -m benchmarks.tables

bench-optimizer:  ## the update, alone and in whole iterations; about 10 minutes
	$(RUN)python -m benchmarks.optimizer
	$(MAKE) bench-pipeline

bench-pipeline:
	$(RUN)python -m benchmarks.pipeline
	$(RUN)python -m benchmarks.tables

bench-dha:  ## direct host access: operators, and models in little memory
	$(RUN)python -m benchmarks.dha
	$(RUN)python -m benchmarks.tables

bench-ablation:  ## what each of the scheduler's ideas gains; ROWS=patterns for a part, PROFILES=folder for plans by profile
	$(RUN)python -m benchmarks.ablation $(if $(ROWS),--rows '$(ROWS)') $(if $(PROFILES),--profiles $(PROFILES))
	$(RUN)python -m benchmarks.tables

bench-plan:  ## predicted iterations against measured ones; PROFILES=folder for those by profile, too
	$(RUN)python -m benchmarks.plan $(if $(ROWS),--rows '$(ROWS)') $(if $(PROFILES),--profiles $(PROFILES))
	$(RUN)python -m benchmarks.tables

bench-machines:  ## iterations on machines that nobody here has, by the simulator; needs no device
	$(RUN)python -m benchmarks.machines
	$(RUN)python -m benchmarks.tables

bench-bandwidth:  ## two CUDA devices or more, for all of it
	$(RUN)memferry bandwidth --all --recalibrate --json benchmarks/results/bandwidth-2xh200.json
	$(RUN)python -m benchmarks.tables

bench-scale:  ## two CUDA devices, or as many as there are; ROWS=patterns for a part
	$(RUN)python -m benchmarks.scale $(if $(ROWS),--rows '$(ROWS)')
	$(RUN)python -m benchmarks.tables

bench-scale-8:  ## the same on eight, in 9 minutes at the most
	$(RUN)python -m benchmarks.scale --gpus 8 --limit-total 540 $(if $(ROWS),--rows '$(ROWS)')
	$(RUN)python -m benchmarks.tables

NATIVE := $(wildcard memferry_rt/native/*.[ch] memferry_rt/native/build.py allocator/memferry_allocator/native/*.[ch] \
  allocator/memferry_allocator/native/*.cpp allocator/memferry_allocator/native/build.py)

$(READY): requirements-dev.txt pyproject.toml setup.py $(NATIVE)
	$(PYTHON) -m venv $(VENV)
	$(RUN)python -m pip install --quiet --upgrade pip
	$(RUN)python -m pip install --quiet -r requirements-dev.txt
	$(RUN)python -m pip install --quiet --no-deps -e .
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
