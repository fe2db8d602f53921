# The few commands people type. Each makes or reuses .venv and says what it does.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
# In the order in which they need each other.
ENGINES := engines/transformers engines/sglang engines/vllm engines/lmcache
DISTS := core segments $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml)) cli $(ENGINES)
TYPED := $(DISTS) tests benchmarks examples/models
# Only the tests ask for these extras.
EXTRAS := core[metrics,testing,tracing] plugins/mooncake[cpu] plugins/nixl[cu12] plugins/s3[demo]
PROJECTS := $(addsuffix /pyproject.toml,$(DISTS))
# Editable installs compile it beside its source, where there is a compiler.
NATIVE := core/hatch_build.py $(wildcard core/src/kvdock/native/*.c)
LIBRARY := core/src/kvdock/native/_pages.so
STAMP := $(VENV)/.installed
# What `make demo` needs of them, and of the pinned tools. A tree that has all has that.
DEMO := core segments plugins/file cli engines/transformers
DEMO_TOOLS := editables hatchling torch transformers
DEMO_STAMP := $(VENV)/.installed-for-demo
EMPTY :=
SPACE := $(EMPTY) $(EMPTY)
QUIET := --quiet --quiet --disable-pip-version-check --no-input
export PIP_ROOT_USER_ACTION := ignore

MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
# Every target but the stamp is a command.
.PHONY: $(shell sed -nE 's/^([a-z][a-z0-9-]*):.*/\1/p' $(MAKEFILE_LIST))

help: ## Show this list.
	@grep -hE '^[a-z][a-z0-9-]*:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /\1\t/' | expand -t 24

venv: $(STAMP) ## Make .venv with everything that the other commands need.

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvdock needs Python 3.11 or newer; set PYTHON=/path/to/it")'
	@echo "== making $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(DEMO_STAMP): requirements-dev.txt $(addsuffix /pyproject.toml,$(DEMO)) $(NATIVE) | $(BIN)/python
	@echo "== installing what the demo needs: $(DEMO), torch and transformers"
	@grep -E '^($(subst $(SPACE),|,$(DEMO_TOOLS)))==' requirements-dev.txt > $@.txt
	@$(BIN)/python -m pip install $(QUIET) -r $@.txt
	@$(BIN)/python -m pip install $(QUIET) --no-build-isolation $(addprefix -e ,$(DEMO))
	@touch $@

# Most of what is installed is never imported: what is, compiles itself.
$(STAMP): requirements-dev.txt $(PROJECTS) $(NATIVE) | $(BIN)/python
	@echo "== installing what development needs (the first time takes a minute or two)"
	@$(BIN)/python -m pip install $(QUIET) --upgrade pip
	@$(BIN)/python -m pip install $(QUIET) --no-compile -r requirements-dev.txt
	@echo "== installing the workspace: $(DISTS)"
	@$(BIN)/python -m pip install $(QUIET) --no-compile --no-build-isolation $(addprefix -e ,$(DISTS) $(EXTRAS))
	@test -e $(LIBRARY) || echo "== the core is built without its library in C: Python does the same, slower"
	@$(BIN)/python -m kvdock_mooncake.system_libraries || true
	@touch $@

demo: $(if $(wildcard $(STAMP)),$(STAMP),$(DEMO_STAMP)) ## Run the main job: store KV pages, end, restore them in a new process (examples/models).
	@$(BIN)/python examples/models $(ARGS)

# Tests start hundreds of processes: what all of them import is compiled once.
test test-slow test-slow-all: export PYTHONDONTWRITEBYTECODE :=

test: $(STAMP) ## Run the quick tests, one file at a time on each of two cores.
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile $(ARGS)

test-slow: $(STAMP) ## Run the tests that take longer: real servers, crashes, big stores.
	$(BIN)/python -m pytest -m "slow and not long" $(ARGS)

test-slow-all: $(STAMP) ## The same with what another test proves as well, with other settings.
	$(BIN)/python -m pytest -m slow $(ARGS)

N ?= 50
test-flaky: $(STAMP) ## Repeat one test N times beside busy processes: N=200 TEST=file::name.
	@test -n "$(TEST)" || { echo "say which: make test-flaky N=200 TEST=tests/file.py::test_name"; exit 2; }
	@$(BIN)/python tests/harness/repeat_test.py $(N) "$(TEST)" $(ARGS)

test-hf3fs: $(STAMP) ## Run the tests of hf3fs on a real mount: MOUNT=/its/mount/point [MODE=posix].
	@test -n "$(MOUNT)" || { echo "say where: make test-hf3fs MOUNT=/its/mount/point"; exit 2; }
	TESTS_OF_KVDOCK_HF3FS_MOUNT="$(MOUNT)" TESTS_OF_KVDOCK_HF3FS_MODE="$(MODE)" $(BIN)/python -m pytest $(if $(filter posix,$(MODE)),plugins/hf3fs/tests/test_contract.py -k TestPosix,plugins/hf3fs) $(ARGS)

test-sglang: ## Run SGLang itself on the CPU, in an environment of its own.
	$(PYTHON) engines/sglang/tests/environment.py --test $(ARGS)

test-sglang-all: ## The same with what takes minutes of a whole engine.
	$(PYTHON) engines/sglang/tests/environment.py --all $(ARGS)

test-sglang-latest: ## Try the newest SGLang on the index, and explain what differs.
	$(PYTHON) engines/sglang/tests/latest.py $(ARGS)

test-sglang-releases: ## Say what differs in SGLang's last three releases, pool by pool.
	$(PYTHON) engines/sglang/tests/latest.py --releases 3 $(ARGS)

test-identity: test-identity-sglang

test-identity-sglang: ## Vary what a CPU can vary of SGLang, an engine for each difference.
	$(PYTHON) engines/sglang/tests/identity.py $(ARGS)

test-mooncake-releases: ## Try the mooncake backend on earlier releases of its library.
	$(PYTHON) plugins/mooncake/tests/releases.py $(ARGS)

test-prometheus: $(STAMP) ## Ask a real Prometheus, Debian's, every query of dashboard and alerts.
	@test -x $(VENV)/prometheus/usr/bin/prometheus || { mkdir -p $(VENV)/prometheus && cd $(VENV)/prometheus && apt-get download prometheus && dpkg -x prometheus_*.deb . ; }
	TESTS_OF_KVDOCK_PROMETHEUS=$(CURDIR)/$(VENV)/prometheus/usr/bin $(BIN)/python -m pytest tests/test_prometheus.py $(ARGS)

test-site: $(STAMP) ## Look at the site in a real browser, Debian's, and run its long examples.
	@command -v chromium chromedriver >/dev/null || { echo "install Debian's chromium and chromium-driver"; exit 2; }
	@$(BIN)/python -m pip install $(QUIET) -r tests/site/requirements.txt
	TESTS_OF_KVDOCK_SITE_LONG=1 $(BIN)/python -m pytest -o faulthandler_timeout=900 tests/site $(ARGS)

test-vllm: ## Run vLLM itself on the CPU, in an environment of its own.
	$(PYTHON) engines/vllm/tests/vllm_environment.py --test $(ARGS)

test-vllm-all: ## The same with every family of models.
	$(PYTHON) engines/vllm/tests/vllm_environment.py --all $(ARGS)

test-lmcache: ## Run LMCache's own benchmark and storage manager on kvdock, in an environment of its own.
	$(PYTHON) engines/lmcache/tests/lmcache_environment.py --test $(ARGS)

test-identity: ## Vary every argument of vLLM that a CPU can vary: may pages be shared?
	@$$($(PYTHON) engines/vllm/tests/vllm_environment.py) engines/vllm/tests/identity_gate.py $(ARGS)

lint: $(STAMP) ## Check style, types and who may import whom.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@# One folder at a time: test modules of two distributions may share a name.
	@for folder in $(TYPED); do echo "mypy $$folder"; $(BIN)/mypy $$folder || exit 1; done
	$(BIN)/lint-imports

budgets: $(STAMP) ## Lower the numbers that may only fall; WHY="..." lets those rise that are over.
	@$(BIN)/python tests/harness/budgets.py "$(WHY)"

format: $(STAMP) ## Rewrite the code in the house style.
	$(BIN)/ruff check --fix --exit-zero .
	$(BIN)/ruff format .

bench: $(STAMP) ## Measure start-up, planning and overhead; the last line is JSON.
	@$(BIN)/python benchmarks/run.py $(ARGS)

bench-direct: $(STAMP) ## Measure pages sent straight to another process, per backend.
	@$(BIN)/python benchmarks/direct.py $(ARGS)

bench-eviction: $(STAMP) ## Count what a full file store restores, beside a page-wise LRU.
	@$(BIN)/python benchmarks/eviction.py $(ARGS)

bench-file: $(STAMP) ## Measure the file backend against its peers and the disk.
	@$(BIN)/python benchmarks/file.py $(ARGS)

bench-hf3fs: $(STAMP) ## Measure the hf3fs backend above the calls of USRBIO (a fake), and beside file.
	@$(BIN)/python benchmarks/hf3fs.py $(ARGS)

bench-mooncake: $(STAMP) ## Measure the mooncake backend against the library alone.
	@$(BIN)/python benchmarks/mooncake.py $(ARGS)

bench-nixl: $(STAMP) ## Measure the nixl backend against the file backend and NIXL alone.
	@$(BIN)/python benchmarks/nixl_files.py $(ARGS)

bench-s3: $(STAMP) ## Measure the s3 backend against obstore alone, boto3 and NIXL.
	@$(BIN)/python benchmarks/s3.py $(ARGS)

bench-seal: $(STAMP) ## Measure what sealing costs over the library's own AES-GCM.
	@$(BIN)/python benchmarks/seal.py $(ARGS)

bench-tiers: $(STAMP) ## Replay a load over memory, disk and a slow far tier, beside what bounds it.
	@$(BIN)/python benchmarks/tier_replay.py $(ARGS)

bench-lmcache: ## Measure kvdock's file below LMCache against LMCache's own file adapter.
	@$$($(PYTHON) engines/lmcache/tests/lmcache_environment.py) benchmarks/lmcache_l2.py $(ARGS)

LMCACHE ?= python3
bench-tiers-lmcache: ## Measure memory and disk beside LMCache's (LMCACHE=a Python that has both).
	@$(LMCACHE) benchmarks/tier_lmcache.py $(ARGS)

check-hicache-classes: ## Run the conformance kit on storage classes of SGLang's, and print the published table.
	@PYTHON=$$($(PYTHON) engines/sglang/tests/environment.py) bash plugins/hicache/tests/classes.sh $(ARGS)

check-s3-servers: $(STAMP) ## Run the conformance kit on s3rver and Azurite, from npm.
	@PYTHON=$(BIN)/python bash plugins/s3/tests/npm_servers.sh $(ARGS)

bench-sglang: ## Measure SGLang with kvdock against SGLang with its own file store.
	@$$($(PYTHON) engines/sglang/tests/environment.py) benchmarks/sglang.py $(ARGS)

bench-outside: ## Measure kvdock by stores, interfaces and a simulator of others, in an environment of its own.
	@$$($(PYTHON) benchmarks/outside/outside_environment.py) benchmarks/outside/run_all.py $(ARGS)

bench-serving: ## Let SGLang's, vLLM's and cache-pressure's benchmarks ask servers with kvdock and without.
	@$(PYTHON) benchmarks/outside/serving.py $(ARGS)

bench-pays: $(STAMP) ## Time to the first token over a grid of stores: loading, computing, kvdock.
	@$(BIN)/python benchmarks/pays.py $(ARGS)

bench-pays-engines: ## The same of SGLang and vLLM themselves, on the CPU and three speeds of a store.
	TESTS_OF_KVDOCK_FIRST_TOKENS=20 $(PYTHON) engines/vllm/tests/vllm_environment.py --all -s -k slow_store_costs $(ARGS)
	TESTS_OF_KVDOCK_FIRST_TOKENS=20 $(PYTHON) engines/sglang/tests/environment.py --all -s -k slow_store_costs $(ARGS)

bench-vllm: ## Measure kvdock behind vLLM's host memory against vLLM's own file tier.
	@$$($(PYTHON) engines/vllm/tests/vllm_environment.py) benchmarks/vllm.py $(ARGS)

bench-vllm-http: ## Hold 20 conversations with vllm serve: host memory alone, its own file tier, kvdock.
	@$$($(PYTHON) engines/vllm/tests/vllm_environment.py) benchmarks/vllm_http.py $(ARGS)

# Where a backend verifies pages itself the core believes a report of the very files.
REPORT := kvdock-report.json
reports: $(STAMP) ## Check the backends that verify pages themselves, and keep the reports of that.
	@$(BIN)/kvdock check file --set free_space=0 --report plugins/file/src/kvdock_file/$(REPORT)
	@$(BIN)/kvdock check nixl --set free_space=0 --set 'root={tmp}/store' --report plugins/nixl/src/kvdock_nixl/$(REPORT)
	@$(BIN)/kvdock check hf3fs --set free_space=0 --set mode=posix --set 'root={tmp}/store' --report plugins/hf3fs/src/kvdock_hf3fs/$(REPORT)

mutants: $(STAMP) ## Hold the conformance kit against wrong backends; the last line is JSON.
	@PYTHONPATH=core/tests/harness $(BIN)/python -m mutants $(ARGS)

torture: $(STAMP) ## Run the long forms of the crash and endurance trials.
	TESTS_OF_KVDOCK_TORTURE=1 $(BIN)/python -m pytest -m slow -o faulthandler_timeout=900 segments plugins/nixl plugins/hf3fs/tests/test_hosts.py tests/test_mutated_stores.py $(ARGS)

torture-direct: $(STAMP) ## Send 10,000 transfers and 20,000 changed messages per backend, and stop peers for 75 s; an hour.
	TESTS_OF_KVDOCK_REQUESTS=10000 $(BIN)/python -m pytest core/tests/peers/test_transfers.py -k healthy
	TESTS_OF_KVDOCK_TORTURE=1 TESTS_OF_KVDOCK_DIRECT_TRANSFERS=10000 TESTS_OF_KVDOCK_DIRECT_MUTATIONS=20000 $(BIN)/python -m pytest -s -o faulthandler_timeout=3600 plugins/nixl/tests/test_peers.py plugins/nixl/tests/test_peer_requests.py plugins/mooncake/tests/test_peers.py plugins/mooncake/tests/test_peer_requests.py -k "75_s or random_layouts or changed_messages" $(ARGS)

trial-hf3fs-hosts: $(STAMP) ## Let two hosts of hf3fs evict, read and die with caches of 30 s; 3 minutes.
	TESTS_OF_KVDOCK_HF3FS_REAL_TIME=180 $(BIN)/python -m pytest -s -o faulthandler_timeout=900 plugins/hf3fs/tests/test_hosts.py -k real_time $(ARGS)

trial-mooncake-late: $(STAMP) ## Freeze an owner for 75 s under reads, in every form; 20 minutes.
	TESTS_OF_KVDOCK_LATE_WRITES=1 $(BIN)/python -m pytest -m slow -s -o faulthandler_timeout=900 plugins/mooncake/tests/test_late_writes.py $(ARGS)

docs: $(STAMP) ## Build the site into build/site.
	@$(BIN)/python -m sphinx -q -W -b html -d build/doctrees docs build/site
	@echo "build/site/index.html"

docs-fill: $(STAMP) ## Write the generated pages of the site again: options, settings, metrics.
	@for script in benchmarks hooks packages commands settings metrics hints manifests compatibility identity sizes rules readme; do $(BIN)/python docs/fill_$$script.py || exit 1; done

dist: $(STAMP) ## Build every wheel and prove them in a clean environment.
	@PYTHON=$(BIN)/python bash .ci/prove-wheels $(DISTS)

release: $(STAMP) ## Build source and wheel of every distribution, and their bill of materials.
	@PYTHON=$(BIN)/python bash .ci/release

try-release: $(STAMP) ## The same, uploaded to an index on loopback and installed from it.
	@PYTHON=$(BIN)/python bash .ci/release --try

clean: ## Remove the environments and everything that was built.
	rm -rf $(VENV) .venv-sglang .venv-vllm .venv-lmcache .venv-mooncake build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis $(LIBRARY)
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
