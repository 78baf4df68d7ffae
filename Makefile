# The two commands a person needs: `make repro` and `make test`. `make help` lists all.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
# The Python of .venv, as `uv venv --python` takes it: a version or a path.
PYTHON ?= >=3.11,<3.14
# The build of torch, as `uv pip install --torch-backend` takes it: cpu, auto, cu130; empty: that of the package index.
TORCH_BACKEND ?=
PRESET ?=
IMAGES ?=
VAL_IMAGES ?=
UI_PORT ?= 5000

# The shell takes the names from its environment, since a folder's name may have an apostrophe.
export PYTHON PRESET IMAGES VAL_IMAGES
# A folder of wheels that pip is told of
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
# The stages call `python`: that of .venv, whether or not it is activated.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
# Neither DVC nor MLflow reports anything to anybody.
export DVC_NO_ANALYTICS := true
export DO_NOT_TRACK := true
export MLFLOW_DISABLE_TELEMETRY := true

INSTALL := uv pip install --python $(VENV)
# One writer, also beside a container on the same folder: DVC knows the processes of its own container only.
LOCKED := python docker/workspace.py

SETUP := $(VENV)/.set-up
SETUP_DEV := $(VENV)/.set-up-dev

.PHONY: help setup repro test test-slow test-all faults random-faults test-cu111 images lint format ui report lock clean

help:  ## this list
	@grep -hE '^[a-z0-9-]+:.*  ## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*  ## /\1\t/' | expand -t 16
	@echo
	@echo "make repro PRESET=sample|coco2017-val|coco2017|coco2014    choose the scale"
	@echo "make repro IMAGES=~/photos [VAL_IMAGES=~/held-out]          train on your own images"
	@echo "TORCH_BACKEND=cpu  a smaller torch for a machine without a GPU"
	@echo "PYTHON=3.12        the Python of .venv, 3.11 to 3.13"

setup: $(SETUP)  ## make .venv from the hash lock

# uv, which finds or downloads a Python, is that of the PATH, or is installed into .venv.
$(VENV)/bin/python:
	@command -v uv >/dev/null || { python3 -m venv $(VENV) && $(VENV)/bin/pip install --quiet uv; }
	@uv venv --seed --allow-existing --python "$$PYTHON" $(VENV)

$(SETUP): requirements/modern.lock requirements/torch.in | $(VENV)/bin/python
	@$(VENV)/bin/python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
		{ echo "error: $(VENV) is of $$($(VENV)/bin/python -V); remove it: rm -r $(VENV)" >&2; exit 2; }
	@command -v uv >/dev/null || $(VENV)/bin/pip install --quiet uv
	@$(INSTALL) $(if $(TORCH_BACKEND),--torch-backend $(TORCH_BACKEND)) -r requirements/modern.lock \
		-r requirements/torch.in -e .
	@touch $@

$(SETUP_DEV): $(SETUP) requirements/modern-dev.lock
	@$(INSTALL) --no-deps -r requirements/modern-dev.lock
	@touch $@

repro: $(SETUP)  ## set up once, then run every stage whose inputs changed, and show the result
ifneq ($(PRESET)$(IMAGES)$(VAL_IMAGES),)
	@$(LOCKED) python -m pipeline.presets use $(if $(PRESET),"$$PRESET") $(if $(IMAGES),--images "$$IMAGES") \
		$(if $(VAL_IMAGES),--val-images "$$VAL_IMAGES")
else
	@$(LOCKED) python -m pipeline.presets refresh
endif
	@python -m pipeline.doctor --quick
	@$(LOCKED) dvc repro
	@echo
	@python -m pipeline.report

test: $(SETUP_DEV)  ## the tests, without the slow ones, in two processes
	@python -m pytest -m "not slow" -n 2 --dist worksteal

test-slow: $(SETUP_DEV)  ## the slow tests alone
	@python -m pytest -m slow -n 2 --dist worksteal

test-all: $(SETUP_DEV)  ## all tests, also the slow ones
	@python -m pytest -n 2 --dist worksteal

# The CUDA 11.1 stack: Python 3.9 and torch 1.10.2 of the package index, whose CUDA 10.2 build runs on the CPU
PYTHON39 ?= $(or $(firstword $(wildcard $(HOME)/.pyenv/versions/3.9.*/bin/python3.9)),3.9)
CU111 := .venv-cu111

$(CU111)/.set-up: requirements/cu111.lock requirements/cu111-dev.lock requirements/torch.in | $(SETUP)
	@uv venv --clear --python "$(PYTHON39)" $(CU111)
	@uv pip install --python $(CU111) -r requirements/cu111.lock -r requirements/cu111-dev.lock -r requirements/torch.in
	@touch $@

# torch 1.10 imports pkg_resources, which warns at every start
test-cu111: $(CU111)/.set-up  ## the tests of the CUDA 11.1 stack: Python 3.9, torch 1.10
	@PATH="$(CURDIR)/$(CU111)/bin:$$PATH" PYTHONWARNINGS=ignore:pkg_resources:UserWarning \
		python -m pytest -m "cu111 and not slow"

# This needs root, buildah and debootstrap.
images:  ## build and try all images without a container engine
	@docker/ci.sh --always

# docs/faults.md describes the faults.
faults: $(SETUP_DEV)  ## kill trainings in every way, and every stage at random (an hour)
	@RANDOM_FAULTS=$(or $(N),100) python -m pytest -n 2 --dist worksteal tests/faults tests/tracking/test_tracking.py \
		tests/train/test_checkpoint.py tests/fetch/test_coco.py

random-faults: $(SETUP_DEV)  ## the random part alone; N=1000 for more faults
	@RANDOM_FAULTS=$(or $(N),100) python -m pytest tests/faults/test_random.py

lint: $(SETUP_DEV)  ## style and types
	@ruff check .
	@ruff format --check .
	@basedpyright --project pyproject.toml

format: $(SETUP_DEV)  ## rewrite what `make lint` would complain about
	@ruff check --fix .
	@ruff format .

ui: $(SETUP)  ## MLflow; prints the address of the table of runs
	@exec python -m pipeline.tracking ui --port $(UI_PORT)

report: $(SETUP)  ## the table of the last evaluation; opens its page
	@python -m pipeline.report --open

# Existing pins are kept; OPTIONS=--upgrade takes newer versions where the .in files allow it. 3.9.2, since
# cryptography excludes 3.9.0 and 3.9.1, and uv reads 3.9 as 3.9.0.
COMPILE := uv pip compile --quiet --generate-hashes --python-platform x86_64-manylinux_2_31 --no-emit-index-url \
	--no-emit-find-links --no-emit-package torch --no-emit-package torchvision --custom-compile-command "make lock" \
	$(if $(UV_FIND_LINKS),,--torch-backend cpu) $(OPTIONS)
lock: $(SETUP)  ## compile requirements/*.in to the locks of both stacks
	@$(COMPILE) --python-version 3.11 requirements/same.in -o requirements/modern.lock
	@$(COMPILE) --python-version 3.11 -c requirements/modern.lock requirements/dev.in requirements/extras.in \
		-o requirements/modern-dev.lock
	@$(COMPILE) --python-version 3.9.2 requirements/same.in -o requirements/cu111.lock
	@$(COMPILE) --python-version 3.9.2 -c requirements/cu111.lock requirements/dev.in \
		-o requirements/cu111-dev.lock

clean:  ## remove what the stages wrote, also checkpoints and models; DVC's cache, .venv and MLflow's runs stay
	@rm -rf data/images data/keypoints checkpoints models reports .pytest_cache .ruff_cache .hypothesis
	@git checkout -q -- reports 2>/dev/null || true
