# Every target makes .venv when it is missing: requirements.lock for serving, requirements-dev.lock for the rest.

PYTHON ?= python3
BIN := .venv/bin
# Small models spin when they get more than one thread: see docs/experiments.md.
ONE_THREAD := OMP_NUM_THREADS=1
# Some environments say that nothing compiled is kept: half of the time to collect tests.
KEEP_COMPILED := PYTHONDONTWRITEBYTECODE=
# Each file of tests runs in one of these processes: its servers and models are started once. They
# wait for servers and clocks a third of their time: three keep two cores busy.
TEST_PROCESSES ?= 3
BY_FILE := -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

# Every target without a path is a command.
.PHONY: $(shell sed -n 's/^\([a-z-]*\):.*/\1/p' Makefile)

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' Makefile | awk -F'|' '{printf "%-18s %s\n", $$1, $$2}'

.venv/serving: requirements.lock pyproject.toml
	@$(PYTHON) .ci/install.py .venv requirements.lock --editable .
	@touch $@

# Drawing a circle takes no browser driver and no linters: what tests need is a lock of its own.
.venv/ready: requirements-dev.lock .venv/serving
	@$(PYTHON) .ci/install.py .venv requirements.lock requirements-dev.lock --editable .
	@touch .venv/serving $@

serve: .venv/serving  ## serve the embedded model on http://127.0.0.1:8000; PORT=8001 MODEL=org/name FLAGS="--workers 2"
	$(BIN)/carpool serve $(MODEL) $(if $(PORT),--port $(PORT)) $(FLAGS)

first-picture:  ## seconds of each part from a fresh clone to the first picture
	$(PYTHON) .ci/first_picture.py

test: .venv/ready  ## all tests: no network, no GPU
	$(KEEP_COMPILED) $(ONE_THREAD) $(BIN)/python -m pytest $(BY_FILE)

# Not among the other requirements: 79 MB that most who develop need not have.
.venv/ray: requirements-ray.lock | .venv/ready
	$(BIN)/pip install --quiet --requirement requirements-ray.lock
	touch $@

test-ray: .venv/ray  ## workers on a Ray cluster of two nodes on this machine (some minutes)
	$(ONE_THREAD) $(BIN)/python -m pytest -m ray tests/fleet/test_ray.py

# Beside the environment: where it is there, diffusers imports it in every process, for seconds.
build/bitsandbytes: | .venv/ready
	$(BIN)/pip install --quiet --no-deps --target $@ bitsandbytes==0.50.2

test-bitsandbytes: .venv/ready build/bitsandbytes  ## weights of bitsandbytes, by its kernels for CPUs
	$(ONE_THREAD) PYTHONPATH=build/bitsandbytes $(BIN)/python -m pytest -m bitsandbytes tests/engine/model/test_quantize.py

# hy3dgen names gradio, onnxruntime and others that shapes do not need: so without dependencies.
build/mesh: | .venv/ready
	$(BIN)/pip install --quiet --no-deps --target $@ hy3dgen==2.0.2 trimesh==5.2.0 einops==0.8.2 pymeshlab==2025.7.post1 \
	  opencv-python-headless==5.0.0.93 scikit-image==0.26.0 scipy==1.17.1 lazy_loader==0.6

test-mesh: .venv/ready build/mesh build/torchvision  ## Hunyuan3D-2 against its own package, which is 450 MB with what it needs
	$(ONE_THREAD) CARPOOL_WRITE_PROOF=1 PYTHONPATH=build/mesh $(BIN)/python -m pytest -k hunyuan3d \
	  tests/engine/model/test_hunyuan3d.py tests/matrix/test_matrix.py

# What a version of Python may break: its compiler, fibers, event loops, sockets, clean-up, imports.
PYTHONS ?= 3.12 3.13
OF_PYTHON := $(patsubst %,tests/%, outsiders/test_pythons.py test_public_api.py telemetry media/test_fetch_url.py \
	$(patsubst %,engine/test_%.py, tokenizers fiber fiber_closing isolation isolation_pipelines failures lifecycle) \
	engine/adapters/test_hooks.py engine/group/test_group.py jobs/test_runner.py worker \
	server/test_serving_signals.py server/test_openai_sdk.py server/test_events.py server/transport \
	matrix/test_matrix.py::test_requests_of_all_kinds_ride_together_and_get_what_they_would_get_alone)

test-pythons:  ## some tests on 3.12 and 3.13, where they are here; ONLY=tests for all, PYTHONS="3.14" for another
	$(KEEP_COMPILED) $(ONE_THREAD) .ci/pythons "$(PYTHONS)" $(BY_FILE) $(or $(ONLY),$(OF_PYTHON))

# A row of the matrix a family, compiled and streamed ones, and HTTP, in about ten minutes each.
VERSIONS ?= 3.12 3.13 3.11+torch==2.7.0+torchao==0.16.0 3.11+torch+torchao
OF_VERSIONS := $(patsubst %,tests/%, matrix/test_matrix.py engine/model/test_compile.py engine/weights \
	server/test_openai_sdk.py)

test-versions:  ## some tests on other Pythons, and on the oldest and newest torch; VERSIONS="3.13" for one
	mkdir -p build
	$(KEEP_COMPILED) $(ONE_THREAD) .ci/pythons "$(VERSIONS)" $(BY_FILE) -m "versions or not (slow or ray or bitsandbytes)" $(or $(ONLY),$(OF_VERSIONS))
	$(if $(ONLY),,$(MAKE) gpu-dry-run)

test-noise: .venv/ready build/torchvision  ## all tests, slow ones too, with other last bits in every shared forward
	$(KEEP_COMPILED) $(ONE_THREAD) CARPOOL_FAULT=forward:noise:1 $(BIN)/python -m pytest $(BY_FILE) -m "not ray and not bitsandbytes"

# torchvision's wheels want a CUDA build of torch; the tests only need its Python part.
build/torchvision: | .venv/ready
	$(BIN)/pip install --quiet --no-deps --target $@ torchvision==0.28.0

build/for-diffusers: | .venv/ready
	$(BIN)/pip install --quiet --no-deps --target $@ parameterized==0.9.0 requests-mock==1.12.1

# Of releases that lie further back, too: they test classes whose tests were taken out since.
test-diffusers: .venv/ready build/torchvision build/for-diffusers  ## pipelines of diffusers' own tests; DIFFUSERS_CHECKOUT=NEWEST:v0.33.1:v0.21.0 names their folders
	PYTHONPATH=build/for-diffusers WRITE_RESULTS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -o addopts=--import-mode=importlib \
		--timeout 300 -rs tests/matrix/test_diffusers_tests.py

test-models: .venv/ready build/torchvision  ## every model and task against plain diffusers
	$(ONE_THREAD) CARPOOL_WRITE_PROOF=1 $(BIN)/python -m pytest -m "slow or not slow" \
	  tests/matrix/test_matrix.py tests/matrix/test_outsiders.py tests/matrix/test_traps_*.py tests/lab/test_load_http.py tests/benchmarks/test_benchmark_gpu.py \
	  tests/benchmarks/test_benchmark_peers.py \
	  tests/training/test_training.py tests/matrix/test_agreement.py tests/test_proof.py tests/engine/test_deaths.py tests/test_site.py \
	  tests/outsiders/test_given_components.py

sharing: .venv/ready build/torchvision build/for-diffusers  ## requests a forward of every class, six at once: docs/sharing.json (40 minutes; DIFFUSERS_CHECKOUT as above)
	PYTHONPATH=build/for-diffusers CARPOOL_WRITE_SHARING=1 HF_HUB_OFFLINE=1 $(ONE_THREAD) $(BIN)/python -m pytest -s -o addopts=--import-mode=importlib \
		--timeout 300 -m "slow or not slow" tests/matrix/test_sharing.py

test-custom: .venv/ready  ## people's own pipelines, callbacks and helpers, in both numerics and three rounds (some minutes)
	$(KEEP_COMPILED) $(ONE_THREAD) $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist load \
	  -m "slow or not slow" tests/matrix/custom

test-pages: .venv/ready  ## every command of the README and the pages, as it stands (some minutes)
	$(KEEP_COMPILED) $(ONE_THREAD) $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist load \
	  -m "slow or not slow" tests/test_page_commands.py

# A browser is no Python package: Debian's and Ubuntu's is taken, where none is there yet.
test-browser: .venv/ready  ## what people do on the playground, in a real Chromium; writes docs/playground
	command -v chromium || command -v google-chrome || \
	  (apt-get update -qq; apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core)
	BROWSER=required PICTURES=docs/playground $(ONE_THREAD) $(BIN)/python -m pytest \
	  -m "slow or not slow" tests/server/playground

bench-texts: .venv/ready  ## texts before pictures: what sharing tokens saves, and how long a drawing waits beside them
	$(ONE_THREAD) PYTHONPATH=tests $(BIN)/python -m benchmarks.texts

demo: .venv/ready  ## 24 clients at once, then 8 clips; writes demo.png and demo-video.mp4
	PYTHONPATH=. $(BIN)/python examples/demo.py
	PYTHONPATH=. $(BIN)/python examples/demo_video.py

bench: .venv/ready  ## against plain diffusers, LitServe, a lock, the simulator: docs/benchmarks.md
	$(ONE_THREAD) $(BIN)/python -m benchmarks.cpu --write
	$(MAKE) bench-peers

bench-peers: .venv/ready  ## servers side by side: Carpool's modes, LitServe, plain diffusers, or any --url: docs/benchmarks.md
	$(ONE_THREAD) $(BIN)/python -m benchmarks.peers $(FLAGS) --write

gpu-page: .venv/ready  ## on a machine with a GPU: all that it can tell, in parts of nine minutes: build/gpu/page.md
	$(BIN)/python -m benchmarks.gpu_page all

# As on a machine with a GPU and no network. Where the index has CUDA builds only, it is one: 3 GB.
build/gpu-machine/ready: benchmarks/gpu_wheels.txt
	rm -rf build/gpu-machine
	"$$(.ci/pythons --find 3.12)" -m venv build/gpu-machine
	build/gpu-machine/bin/pip install --quiet torch==2.11.0 transformers==5.17.0 huggingface_hub==1.33.0 numpy==2.5.2
	build/gpu-machine/bin/pip install --quiet --no-deps --target build/gpu-machine/site --requirement $<
	touch $@

gpu-dry-run: build/gpu-machine/ready  ## all parts of gpu-page with tiny models, on Python 3.12 and torch 2.11, no driver (ten minutes)
	rm -rf build/gpu-dry-run
	$(KEEP_COMPILED) PYTHONPATH=src:build/gpu-machine/site HF_HUB_OFFLINE=1 $(ONE_THREAD) build/gpu-machine/bin/python \
	  -m benchmarks.gpu_page all --device cpu --tiny --output build/gpu-dry-run

real-size: .venv/ready  ## FLUX.1-schnell and Wan 2.2 of published size under 8 GiB, on a CPU: docs/streaming.md (an hour, 60 GB of disk)
	$(BIN)/python -m proof.real_size --write

bench-scheduler: .venv/ready  ## how long the policy thinks, and what a step costs the engine
	$(BIN)/python benchmarks/scheduler.py

bench-step-cache: .venv/ready  ## steps skipped, pictures right, requests done: docs/step-cache.md
	$(ONE_THREAD) $(BIN)/python -m benchmarks.step_cache --output docs/step-cache.md

simulate: .venv/ready  ## every mode on every cost table; writes docs/scheduling.md and .csv
	$(ONE_THREAD) $(BIN)/python docs/make_scheduling.py

constants: .venv/ready  ## the scheduler with each constant halved and doubled; writes docs/scheduling-constants.csv
	$(ONE_THREAD) $(BIN)/python docs/make_constants.py

plans: .venv/ready  ## what the planner's models need and give on five devices; writes docs/plans.md
	$(ONE_THREAD) $(BIN)/python docs/make_plans.py

simulate-routing: .venv/ready  ## every router in every scene; writes docs/routing.md
	$(ONE_THREAD) $(BIN)/python docs/make_routing.py

# Not among the project's requirements: it brings versions of its own.
build/fuzz/ready: | .venv/ready
	$(PYTHON) -m venv build/fuzz
	build/fuzz/bin/pip install --quiet schemathesis==4.32.5
	touch $@

PROOF := $(ONE_THREAD) $(BIN)/python -m

fuzz: .venv/ready build/fuzz/ready  ## what the OpenAPI document allows and forbids (five minutes)
	$(PROOF) proof.fuzz --write

chaos: .venv/ready  ## kill, stop, fill the disk, vanish, for ten minutes; nothing may be lost
	$(PROOF) proof.chaos --write

chaos-fleet: .venv/ready  ## the same with three workers of two models
	$(PROOF) proof.chaos --workers 3 --write

chaos-ray: .venv/ray  ## the same on two nodes of a Ray cluster: they are killed and frozen, too
	$(PROOF) proof.chaos --workers 3 --ray --write

long-jobs: .venv/ready  ## twenty jobs of a thousand steps while what runs them is killed (ten minutes)
	$(PROOF) proof.long_jobs --write

soak: .venv/ready  ## half an hour of use; nothing may grow
	$(PROOF) proof.soak --write

soak-fleet: .venv/ready  ## the same with three workers of two models
	$(PROOF) proof.soak --workers 3 --write

hostile: .venv/ready  ## attacks by one tenant, and what another one feels (five minutes)
	$(PROOF) proof.hostile --write

overload: .venv/ready  ## ten times more than the server can do, for a minute
	$(PROOF) proof.overload --write

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/ready
	$(BIN)/mypy

lines:  ## lines and names by room, against their budgets
	$(PYTHON) tests/test_budgets.py

# An environment of its own, without the checkout: what pip makes of the wheel and requirements.lock.
build/wheel/ready: requirements.lock
	rm -rf build/wheel
	$(PYTHON) .ci/install.py build/wheel requirements.lock
	touch $@

test-wheel: .venv/ready build/wheel/ready  ## build the wheel, install it alone, serve and generate with it
	rm -rf build/dist
	$(BIN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/dist .
	build/wheel/bin/pip install --quiet --no-deps --force-reinstall build/dist/carpool-*.whl
	$(ONE_THREAD) build/wheel/bin/python -I .ci/wheel.py build/dist/carpool-*.whl

shapes: .venv/ready  ## train the embedded model again (two hours on two cores; wants g++)
	$(BIN)/python -m training.shapes.train

shapes-lora: .venv/ready  ## train the adapter `outlined` again (an hour on one core)
	$(ONE_THREAD) $(BIN)/python -m training.shapes.train_lora

shapes-rewriter: .venv/ready  ## train the rewriter of prompts again (half an hour on one core)
	$(ONE_THREAD) $(BIN)/python -m training.shapes.rewriter

shapes-video: .venv/ready  ## train the embedded video model again (1.5 hours on two cores; wants g++)
	$(ONE_THREAD) $(BIN)/python -m training.shapes.video.train

devices: .venv/ready build/torchvision  ## where requests wait for a device: docs/devices.md
	$(ONE_THREAD) $(BIN)/python docs/make_devices.py

docs: .venv/ready  ## write docs/reference.md, http.md, models.md, python.md and the drawing
	$(BIN)/python docs/make_reference.py
	$(BIN)/python docs/make_http.py
	$(BIN)/python docs/make_models.py
	$(BIN)/python docs/make_python.py
	$(BIN)/python docs/make_drawing.py
	$(BIN)/python docs/make_weight.py

files: .venv/ready  ## what each file is, by folder: the first sentences of their docstrings
	@$(BIN)/python docs/make_files.py

# An environment of its own, as for fuzzing.
build/site/ready:
	$(PYTHON) -m venv build/site
	build/site/bin/pip install --quiet mkdocs==1.6.1 mkdocs-material==9.8.1 pymdown-extensions==13.1
	touch $@

site: build/site/ready  ## build/html from docs/, its links checked, nothing from other hosts
	NO_MKDOCS_2_WARNING=1 build/site/bin/mkdocs build --strict
	build/site/bin/python docs/check_site.py build/html

FREEZE := build/lock/bin/pip freeze --exclude-editable | sed 's/+cpu$$//'
lock:  ## choose the newest versions that pyproject.toml allows, and write the locks
	rm -rf build/lock && $(PYTHON) -m venv build/lock
	build/lock/bin/pip install --quiet torch==2.13.0
	build/lock/bin/pip install --quiet --editable '.[video,otel]'
	$(FREEZE) > requirements.lock
	build/lock/bin/pip install --quiet --constraint requirements.lock --editable '.[dev]'
	$(FREEZE) | grep -vxFf requirements.lock > requirements-dev.lock
	build/lock/bin/pip install --quiet --constraint requirements.lock --constraint requirements-dev.lock --editable '.[ray]'
	$(FREEZE) | grep -vxFf requirements.lock -f requirements-dev.lock > requirements-ray.lock
