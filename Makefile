# Everything needs nothing beforehand: each target makes the virtual environment it runs in.
PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= 2.13.0
URL    ?=

bin := $(VENV)/bin
ready := $(VENV)/.ready

.PHONY: install test demo bench soak lint clean

install: $(ready)

# torch goes first and pinned: left to the resolver it brings gigabytes of CUDA to machines that have none
$(ready): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(bin)/python -m pip install --quiet --disable-pip-version-check torch==$(TORCH)
	$(bin)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

lint: $(ready)
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/mypy

test: lint
	$(bin)/python -m pytest -m 'not soak'

soak: $(ready)
	$(bin)/python -m pytest -m soak --timeout 3600

demo: $(ready)
	$(bin)/python examples/demo.py $(if $(URL),--url $(URL))

bench: $(ready)
	$(bin)/python benchmarks/save_stall.py

clean:
	rm -rf $(VENV) build .mypy_cache .pytest_cache .ruff_cache
