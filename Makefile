# The two commands a person needs: `make repro` and `make test`. `make help` names the others.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
# Python 3.11 to 3.13, for making .venv; empty: python3.11, else python3.
PYTHON ?=
# Another package index for torch and torchvision, for instance one with CPU builds; empty: pip's own.
TORCH_INDEX ?=
PRESET ?=
IMAGES ?=
VAL_IMAGES ?=
UI_PORT ?= 5000

export PYTHON TORCH_INDEX
# The shell takes the names from its environment, since a folder's name may have an apostrophe.
export PRESET IMAGES VAL_IMAGES
# The stages call `python`: that of .venv, whether or not it is activated.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
# Neither DVC nor MLflow reports anything to anybody.
export DVC_NO_ANALYTICS := true
export DO_NOT_TRACK := true
export MLFLOW_DISABLE_TELEMETRY := true
export MLFLOW_SERVER_ENABLE_JOB_EXECUTION := false

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
	@echo "TORCH_INDEX=...  another package index for torch    PYTHON=...  the interpreter for .venv"

setup: $(SETUP)  ## make .venv from the hash lock

$(SETUP): requirements/modern.lock requirements/install.sh
	@requirements/install.sh $(VENV) run
	@touch $@

$(SETUP_DEV): $(SETUP) requirements/modern-dev.lock requirements/modern-extras.lock
	@requirements/install.sh $(VENV) dev
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

test-cu111:  ## the tests marked cu111 on the CUDA 11.1 stack, Python 3.9 and torch 1.10 (.venv-cu111)
	@requirements/test-cu111.sh -q -m "cu111 and not slow"

images:  ## build and try all images without a container engine (root, buildah, debootstrap)
	@docker/ci.sh --always

faults: $(SETUP_DEV)  ## kill trainings in every way, and every stage at random (an hour): docs/faults.md
	@RANDOM_FAULTS=$(or $(N),100) python -m pytest -n 2 --dist worksteal tests/faults tests/tracking/test_tracking.py \
		tests/train/test_checkpoint.py tests/fetch/test_coco.py

random-faults: $(SETUP_DEV)  ## its random part alone: 100 faults, or make random-faults N=1000
	@RANDOM_FAULTS=$(or $(N),100) python -m pytest tests/faults/test_random.py

lint: $(SETUP_DEV)  ## style, dvc.yaml against the imports of its stages, types
	@ruff check .
	@ruff format --check .
	@python tests/import_closure.py
	@basedpyright --project pyproject.toml

format: $(SETUP_DEV)  ## rewrite what `make lint` would complain about
	@ruff check --fix .
	@ruff format .

ui: $(SETUP)  ## MLflow; prints the address of the table of runs
	@exec python -m pipeline.tracking ui --port $(UI_PORT)

report: $(SETUP)  ## the table of the last evaluation; opens its page
	@python -m pipeline.report --open

lock:  ## compile requirements/*.in into the locks (needs uv)
	@requirements/compile.sh

clean:  ## remove what the stages wrote; DVC's cache, .venv and the MLflow store stay
	@rm -rf data/images data/keypoints checkpoints models reports .pytest_cache .ruff_cache .hypothesis
	@git checkout -q -- reports 2>/dev/null || true
