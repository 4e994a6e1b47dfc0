# dsv4kit. `make help` lists what there is; variables go behind the target: make submit HW=cpu STEPS=24
SHELL := /bin/bash
.DEFAULT_GOAL := help
TARGETS := help setup setup-dev runtime plan doctor submit runs status report track logs explain checkpoints resume cancel export image pins sources data model test test-unit test-golden test-runtime test-megatron test-v4 test-image-gpu test-cluster test-e2e lint bench bench-bringup lock
.PHONY: $(TARGETS)

# What a shell has for other Pythons would replace packages of this one.
unexport PYTHONPATH PYTHONHOME PYTHONUSERBASE
export PYTHONNOUSERSITE := 1

PYTHON ?= python3
VENV := .venv
KIT := $(VENV)/bin/dsv4kit
# Where the environment forbids bytecode, a hundred short-lived processes of the tests compile the kit anew.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(VENV)/bin/python -m pytest

# The variables of this command line go to the kit as they were typed: $(value) keeps make from expanding them, and
# unexport keeps make from expanding them into the environment. The kit knows which ones a verb takes.
CLI_VARIABLES := $(foreach v,$(.VARIABLES),$(if $(filter command,$(origin $v)),$v))
export DSV4KIT_MAKE_VARIABLES := $(filter-out PYTHON,$(CLI_VARIABLES))
$(foreach v,$(CLI_VARIABLES),$(eval export DSV4KIT_MAKE_$v := $$(value $v)))
$(foreach v,$(CLI_VARIABLES),$(eval unexport $v))

# The kit knows what its verbs take; the other targets take these.
KIT_TARGETS := submit plan doctor runs status report track logs explain checkpoints resume cancel export image pins sources data model
OWN_TARGETS := $(filter-out $(KIT_TARGETS),$(filter $(TARGETS),$(or $(MAKECMDGOALS),help)))
OWN_VARIABLES := PYTHON$(if $(filter runtime test test-runtime test-megatron test-v4,$(OWN_TARGETS)), TORCH_INDEX)$(if $(filter test-megatron test-v4 test-image-gpu,$(OWN_TARGETS)), MEGATRON_LM)$(if $(filter test-v4 test-image-gpu,$(OWN_TARGETS)), MEGATRON_BRIDGE)$(if $(filter test-image-gpu,$(OWN_TARGETS)), VERL)
UNKNOWN := $(filter-out $(OWN_VARIABLES),$(CLI_VARIABLES))
$(if $(and $(OWN_TARGETS),$(UNKNOWN)),$(error make $(firstword $(OWN_TARGETS)): unknown variable $(firstword $(UNKNOWN)); allowed: $(OWN_VARIABLES)))

help:  ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/.control  ## install the command line tool into .venv (no torch)

setup-dev: $(VENV)/.dev  ## setup, and what the tests and checks need

$(VENV)/.control: containers/locks/control.lock pyproject.toml containers/make-venv.sh containers/isolate.sh
	@./containers/make-venv.sh "$(PYTHON)" $(VENV) containers/locks/control.lock
	@touch $@

$(VENV)/.dev: containers/locks/dev.lock $(VENV)/.control
	@./containers/make-venv.sh "$(PYTHON)" $(VENV) containers/locks/dev.lock
	@touch $@

submit: setup  ## start a run: make submit HW=cpu [NODES= STEPS= SEGMENT_STEPS= CHAIN= RUN= SET= VERL= DRY_RUN=1 ...]
	@$(KIT) --make submit

plan: setup  ## what fits, how big, how long, before any node-hour: make plan HW=gb200 NODES=64 [SEARCH=1 EXPLAIN=1]
	@$(KIT) --make plan

doctor: setup  ## is this cluster ready: make doctor HW=gb200; NODES=2 has two nodes examine themselves
	@$(KIT) --make doctor

runs: setup  ## show all runs, a line each [STATE=running MATCH='pro-*' SORT=left]
	@$(KIT) --make runs

status: setup  ## show a run [RUN=]
	@$(KIT) --make status

report: setup  ## one page about a run, into its directory [RUN= WITH=OTHER_RUN FORMAT=md OUT=]
	@$(KIT) --make report

track: setup  ## a run's curve for a tracker, without a network: make track TO=tensorboard [RUN= OUT=]
	@$(KIT) --make track

logs: setup  ## show a run's log [RUN= SEGMENT= WHAT= NODE= TAIL= GREP= SINCE= FOLLOW=1 ALL=1]
	@$(KIT) --make logs

explain: setup  ## what the processes of a running segment are doing now, on all nodes [RUN=]
	@$(KIT) --make explain

checkpoints: setup  ## a run's checkpoints, and which are complete [RUN=]
	@$(KIT) --make checkpoints

resume: setup  ## go on with a run, or extend it [RUN= STEPS= FROM_STEP= FORGET_NODES=1]
	@$(KIT) --make resume

cancel: setup  ## end a run; what is saved stays [RUN=]
	@$(KIT) --make cancel

export: setup  ## a checkpoint as a directory that vLLM and transformers load [RUN= STEP=]
	@$(KIT) --make export

image: setup  ## build a container image and its squashfs: make image HW=cpu [IMAGE= ENGINE= BASE_IMAGE= VERL_SHA= ...]
	@$(KIT) --make image build

pins: setup  ## look up the base image's digest and the commits that no release knows, and record them: make pins HW=gb200 [STACK= AGAIN=1]
	@$(KIT) --make image pins

sources: setup  ## Megatron-LM and Megatron-Bridge with DeepSeek-V4: how to clone them, are these they [MEGATRON_LM= MEGATRON_BRIDGE= STACK=]
	@$(KIT) --make sources

data: setup  ## a data set in verl's columns: make data DATA=gsm8k FORMAT=grpo OUT=DIR [FROM=LOCAL_COPY TOKENIZER=DIR ...]
	@$(KIT) --make prepare data

model: setup  ## is a local model whole: make model MODEL_PATH=DIR [MODEL=dsv4-pro HASHES=FILE PROXY=DIR]
	@$(KIT) --make prepare model

runtime: setup  ## install what HW=cpu trains with: torch, vLLM, verl, Ray (about 3 GB, once) [TORCH_INDEX=]
	@TORCH_INDEX="$${DSV4KIT_MAKE_TORCH_INDEX:-$$TORCH_INDEX}" $(VENV)/bin/python -c 'from dsv4kit.sandbox.runtime import runtime_python; runtime_python()'

# Two files at a time, in the order of pyproject.toml: much of a cluster's time is waiting, and two is what 16 GB hold.
test: setup-dev runtime  ## every test, quick ones first (under 15 minutes on two cores, once all is installed)
	@$(PYTEST) --numprocesses 2 --dist loadfile --no-loadscope-reorder

test-unit: setup-dev  ## pure logic, seconds
	@$(PYTEST) tests/unit

test-golden: setup-dev  ## rendered scripts against reviewed text
	@$(PYTEST) tests/golden

test-runtime: setup-dev runtime  ## the plugin inside the trainer's environment, and against the real Megatron
	@$(PYTEST) tests/runtime tests/megatron

test-megatron: setup-dev runtime  ## the plugin against a checkout of Megatron-LM [MEGATRON_LM=, else the locked one]
	@DSV4KIT_MEGATRON_LM="$$DSV4KIT_MAKE_MEGATRON_LM" $(VENV)/bin/python tests/megatron/environment.py -q

test-v4: setup-dev runtime  ## DeepSeek-V4 itself on a CPU: MEGATRON_LM=DIRECTORY MEGATRON_BRIDGE=DIRECTORY (docs/v4.md)
	@DSV4KIT_MEGATRON_LM="$$DSV4KIT_MAKE_MEGATRON_LM" DSV4KIT_MEGATRON_BRIDGE="$$DSV4KIT_MAKE_MEGATRON_BRIDGE" $(VENV)/bin/python tests/v4/start.py -q

test-image-gpu: setup-dev  ## pro-grpo's packages and early proof for real, without a GPU: MEGATRON_LM= MEGATRON_BRIDGE= VERL= (docs/images.md)
	@DSV4KIT_MEGATRON_LM="$$DSV4KIT_MAKE_MEGATRON_LM" DSV4KIT_MEGATRON_BRIDGE="$$DSV4KIT_MAKE_MEGATRON_BRIDGE" DSV4KIT_VERL="$$DSV4KIT_MAKE_VERL" $(PYTEST) -s tests/image_gpu

test-cluster: setup-dev  ## a real Slurm on this machine, stand-in trainers
	@$(PYTEST) tests/cluster

test-e2e: setup-dev  ## the real trainer on a real Slurm
	@$(PYTEST) tests/e2e

lint: setup-dev  ## ruff, mypy --strict, shellcheck
	@$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/shellcheck $$(git ls-files '*.sh' .ci/run)

bench: setup-dev  ## measure the times that are promised; fails where one is broken
	@$(VENV)/bin/python -m benchmarks

bench-bringup: setup-dev  ## Ray's bring-up beside what people do today: 2, 4, 8, 16 nodes, half an hour
	@$(VENV)/bin/python -m benchmarks.bringup

lock: setup-dev  ## make the locks again from pyproject.toml and containers/stack.yaml
	@./containers/make-locks.sh $(VENV)
