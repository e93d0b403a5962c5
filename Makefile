# Two commands: `make demo` and `make test`. Both set up .venv first. `make help` lists the others.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
comma := ,
# What .venv has of pyproject.toml. The builder of trt-rtx needs no GPU.
GROUP := dev
EXTRAS := client,complete,demo,grpc,otel,ray,trt-rtx
NATIVE := $(shell find plugins \( -path plugins/cuda -o -path plugins/tensorrt \) -prune -o \
  \( -name '*.cc' -o -name '*.h' -o -name CMakeLists.txt \) -print)
# `make test` builds for one architecture, or for those that build/cuda has already.
BUILT_CUDA_ARCH := $(shell sed -n 's/^AFT_CUDA_ARCH:STRING=//p' build/cuda/CMakeCache.txt 2> /dev/null | tr ';' ' ')
AFT_CUDA_ARCH ?= $(if $(filter test test-prerequisites,$(MAKECMDGOALS)),$(or $(BUILT_CUDA_ARCH),90),80 86 89 90 100 120)
CUDA_WHEELS := cuda-toolkit[nvcc,cudart,cccl]==13.0.*
space := $(subst ,, )

# PART=1: of test-docs, the native tests and test-cuda a seeded part, as continuous integration runs them.
PART ?=
WHOLE := $(if $(PART),,AFT_TEST_ALL=1)

# What compilers made is kept by content in the user's cache, for every checkout.
ifneq ($(shell command -v ccache 2> /dev/null),)
export CMAKE_CXX_COMPILER_LAUNCHER := ccache
export CCACHE_BASEDIR := $(CURDIR)
export CCACHE_NOHASHDIR := 1
endif

# Debian's names of the packages that the suite needs, besides make and Python.
SYSTEM_PACKAGES := binutils ccache chromium clang curl g++ python3-venv

.PHONY: demo test test-prerequisites test-all test-docs test-versions test-lower help system-packages test-native \
  test-kernel native-aarch64 test-cuda cuda cuda-mutations cuda-table gpu-check gpu-roofline wheels sdist wheel-x86_64 \
  wheel-aarch64 wheel-pure cuda-wheel check-wheels bench bench-model bench-encoders bench-documents bench-quick \
  bench-record models docs reference load soak lint format pins clean

## Try it

demo: $(VENV)/installed  ## train a small classifier, export it, check parity, serve it, ask it
	$(BIN)/aftexport demo

## Test

# SLOW=1: with the tests that take seconds each, as continuous integration runs them.
SLOW ?=

# PyTorch has one thread in each process, as threads without work spin: on two cores some tests of exports took 38 s of
# processor time with two threads, and 25 s with one.
PARALLEL := OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --maxprocesses 4

# The CUDA kernels first: some tests look at what was built.
test:  ## lint, types, and the quick tests with a part of their large tables
	$(MAKE) --jobs 2 --output-sync test-prerequisites
	$(PARALLEL) --dist loadfile --durations 10 --ignore tests/docs \
	  --ignore tests/examples --ignore tests/wheels $(if $(SLOW),,-m "not slow")

# Lint and each download use at most one core, so they run beside the compilers.
test-prerequisites: lint cuda build/third_party/installed build/peers/installed cuda-emulated

test-all: lint build/third_party/installed build/peers/installed cuda sdist wheel-x86_64  ## all cases and the largest sizes, one test at a time, in 16 GiB
	AFT_TEST_ALL=1 TORCH=1 $(BIN)/pytest --durations 10

# A page takes up to a minute, so a process that has none left takes those of the other.
test-docs: $(VENV)/installed  ## every command of README and documentation, and every example
	$(WHOLE) $(PARALLEL) --dist worksteal --durations 10 tests/docs tests/examples

# One environment of tests/versions/matrix.toml at a time, and only those without a row of the current tests in
# tests/versions/record.json.
# VERSIONS="torch-2.15 --again" runs one again; VERSIONS=--help shows all options.
VERSIONS ?=
test-versions: $(VENV)/installed  ## the exporter and the server with each torch and Python; downloads gigabytes
	PYTHONPATH=tests:tests/support $(BIN)/python -m versions $(VERSIONS)

# Packages without a lower bound, such as pytest, come from .venv, and so does torch.
LOWER_TESTS := tests/test_internals.py tests/export/calibration/test_fit.py tests/export/lowering/test_file_format.py \
  tests/export/operators/mechanisms/test_bodies.py::test_body_is_right_in_runtime tests/export/runtimes/test_models_in_runtimes.py \
  tests/serve/http/test_connection.py tests/serve/test_settings.py
test-lower: build/lowest/installed  ## a part of the suite with the lower bounds of all dependencies but torch
	$(subst $(BIN)/pytest,build/lowest/bin/python -m pytest,$(PARALLEL)) --dist loadfile -p no:cacheprovider $(LOWER_TESTS)

build/lowest/installed: constraints-lowest.txt $(VENV)/installed
	test -d build/lowest || $(BIN)/python -m venv build/lowest
	build/lowest/bin/pip install --quiet --requirement constraints-lowest.txt
	echo "import site; site.addsitedir('$$(echo $(CURDIR)/$(VENV)/lib/python3*/site-packages)')" \
	  > "$$(echo build/lowest/lib/python3*/site-packages)/venv.pth"
	touch $@

# FAMILIES="BERT 'T5 encoder'": only these; --fp32 leaves out the exports in bf16 and int8.
FAMILIES ?=
models: $(VENV)/installed  ## tiny models of transformers' families: their record, and docs/models.md from it
	PYTHONPATH=tests:tests/support $(BIN)/python -m families $(FAMILIES)
	$(BENCHMARKS).tables

system-packages:  ## the Debian packages the suite needs: prints their names, and as root installs them
	@echo $(SYSTEM_PACKAGES)
	@if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null && ! dpkg -s $(SYSTEM_PACKAGES) > /dev/null 2>&1; then \
	  apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $(SYSTEM_PACKAGES); \
	fi

# As they ship, and under each sanitizer. What this processor lacks of AVX-512 and AMX is emulated under the address
# sanitizer, and skipped by name in the other two.
has = $(findstring $(1),$(file < /proc/cpuinfo))
EMULATE_AVX512 := $(if $(call has,avx512_bf16),OFF,ON)
EMULATE_AMX := $(if $(call has,amx_int8),OFF,ON)
test-native: $(VENV)/installed $(foreach kind,plain address+undefined thread,native-$(kind))  ## the CPU kernels' C++ tests

# Random cases: what is wrong by numbers shows in the plain build, so the sanitizers' part is smaller.
export AFT_RANDOM_CASES ?= $(if $(PART),3500,14000)
native-address+undefined native-thread: export AFT_RANDOM_CASES := $(if $(PART),1000,$(AFT_RANDOM_CASES))
export AFT_TEST_PART := $(PART)

# A part compiles the sanitizers' kernels for the widest instruction set only, as the copies for all sets take minutes:
# its vectors reach furthest beyond a row, and races hardly depend on the set. The plain build has all sets.
WIDEST := $(firstword $(foreach isa,avx512_bf16 avx512_vnni avx512dq avx2,$(call has,$(isa))))
ONLY_address+undefined := $(if $(WIDEST),avx512_bf16)
ONLY_thread := $(WIDEST:avx512dq=avx512)

native-%: $(VENV)/installed
	$(BIN)/cmake -S plugins -B build/native/$* -G Ninja -DCMAKE_MAKE_PROGRAM="$(CURDIR)/$(BIN)/ninja" \
	  -DAFT_TESTS=ON -DAFT_SANITIZE=$(subst +,$(comma),$(filter-out plain,$*)) \
	  -DAFT_ONLY_ISA=$(if $(PART),$(ONLY_$*)) \
	  -DAFT_EMULATE_AVX512=$(if $(findstring address,$*),$(EMULATE_AVX512),OFF) \
	  -DAFT_EMULATE_AMX=$(if $(findstring address,$*),$(EMULATE_AMX),OFF)
	$(BIN)/cmake --build build/native/$* --parallel 2 --target native_tests
	$(BIN)/ctest --test-dir build/native/$* --parallel 2 --output-on-failure

# K=aft_simple: only the tests with this word in their name, such as AftSimple; -k ignores case.
K ?=
KERNEL_TESTS := tests/plugins --ignore tests/plugins/cuda --ignore tests/plugins/tensorrt \
  $(addprefix tests/export/operators/mechanisms/test_,causal_depthwise_conv.py recurrent_linear_attention.py softmax_attention.py)
test-kernel: $(VENV)/installed  ## build what changed of the CPU kernels, and compare them with the definitions
	$(BIN)/pytest --durations 5 -m "not slow" $(KERNEL_TESTS) $(if $(K),-k "$(K) or $(subst _,,$(K))")

# With g++-aarch64-linux-gnu and qemu-user-static, as Debian calls them. An instruction set is tested on a processor that
# has no more: cortex-a53 is the baseline, neoverse-n1 has sdot, and max has all that QEMU knows. cortex-a72 is like
# cortex-a53, and tested only without PART=1.
AARCH64_CPUS := cortex-a53 $(if $(PART),,cortex-a72) neoverse-n1 max
native-aarch64: export AFT_RANDOM_CASES := $(if $(PART),1000,$(AFT_RANDOM_CASES))
native-aarch64: $(VENV)/installed  ## the same for aarch64, emulated
	$(BIN)/cmake -S plugins -B build/native/aarch64 -G Ninja -DCMAKE_MAKE_PROGRAM="$(CURDIR)/$(BIN)/ninja" \
	  -DAFT_TESTS=ON -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
	  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
	  -DCMAKE_CROSSCOMPILING_EMULATOR="qemu-aarch64-static;-L;/usr/aarch64-linux-gnu"
	$(BIN)/cmake --build build/native/aarch64 --parallel 2 --target native_tests
	for cpu in $(AARCH64_CPUS); do \
	  case $$cpu in max) isa=neon_i8mm_bf16 ;; neoverse-n1) isa=neon_dotprod ;; *) isa=baseline ;; esac; \
	  echo "On $$cpu:" && AFT_NO_SKIPS=1 QEMU_CPU=$$cpu \
	    $(BIN)/ctest --test-dir build/native/aarch64 --output-on-failure --tests-regex $$isa || exit 1; \
	done

## Kernels

# The CUDA kernels, build/cuda/libaft_cuda.a, and the libraries over them for ONNX Runtime and TensorRT, in
# plugins/aftplugins; needs no GPU, and installs nvcc where the system has none. TENSORRT_ROOT: whose headers the
# TensorRT plugins are built with.
cuda: $(VENV)/installed  ## the CUDA kernels and the libraries over them; without a GPU too
	@command -v nvcc > /dev/null || ls $(VENV)/lib/python3*/site-packages/nvidia/cu13/bin/nvcc > /dev/null 2>&1 || \
	  $(BIN)/pip install '$(CUDA_WHEELS)'
	$(BIN)/cmake -S plugins/cuda -B build/cuda -G Ninja -DCMAKE_MAKE_PROGRAM="$(CURDIR)/$(BIN)/ninja" \
	  -DCMAKE_CUDA_COMPILER="$$(command -v nvcc || ls "$(CURDIR)/$(VENV)"/lib/python3*/site-packages/nvidia/cu13/bin/nvcc)" \
	  -DAFT_CUDA_ARCH="$(subst $(space),;,$(strip $(AFT_CUDA_ARCH)))" -DAFT_MANYLINUX=OFF
	$(BIN)/cmake --build build/cuda --parallel 2
	$(BIN)/cmake --install build/cuda --prefix plugins/aftplugins

# The CUDA kernels on an emulated GPU, and through the TensorRT plugins, beyond what `make test` does: under each
# sanitizer, and with faults planted in them that must be noticed.
test-cuda: $(foreach kind,address+undefined thread,cuda-emulated-$(kind)) cuda-mutations  ## those kernels on an emulated GPU

# The tests fail where a CUDA kernel takes more than in this table, which is committed.
cuda-table: cuda  ## the CUDA kernels' registers and shared memory, tests/plugins/cuda/resources.tsv, written again
	PYTHONPATH=tests:tests/support $(BIN)/python -m plugins.cuda.resources

# What the tests of CUDA kernels build by themselves, in the build's own time.
.PHONY: cuda-emulated
cuda-emulated: $(VENV)/installed
	PYTHONPATH=tests:tests/support $(BIN)/python -m plugins.cuda.emulated

cuda-emulated-%: $(VENV)/installed
	$(WHOLE) AFT_SANITIZE=$(subst +,$(comma),$(filter-out plain,$*)) $(PARALLEL) \
	  tests/plugins/cuda/test_cuda_kernels.py tests/plugins/tensorrt/test_plugins.py

cuda-mutations: $(VENV)/installed
	$(WHOLE) AFT_CUDA_MUTATIONS=1 $(BIN)/pytest tests/plugins/cuda/test_mutations.py

# The CUDA kernels on this machine's NVIDIA GPU: checked, timed, recorded in tests/benchmarks/gpu; and the models that
# this aftexport exports, in ONNX Runtime's CUDA provider and TensorRT. It needs PyTorch; nothing is installed. A call
# takes under eight minutes, and GPU_CHECK=--continue goes on. A check that cannot run here fails, unless it is left
# out: GPU_CHECK=--help shows how. Without a GPU it says so and exits with 3.
gpu-check:  ## the CUDA kernels on the GPU of this machine, checked and timed
	@PYTHONPATH=tests:tests/support:export:plugins$${PYTHONPATH:+:$$PYTHONPATH} "$(PYTHON)" -m benchmarks.gpu $(GPU_CHECK)

# Of GPUs that need not be here: ROOFLINE=--help shows the options.
gpu-roofline: $(VENV)/installed  ## the least time of each mechanism on five GPUs, by its bytes and products
	@PYTHONPATH=tests:tests/support $(BIN)/python -m benchmarks.gpu.roofline $(ROOFLINE)

## Wheels

# Compiled by this machine's compiler and Debian's g++-aarch64-linux-gnu, with the commands that `make test-native` uses,
# so the kernels are the tested ones, and ccache has them. plugins/manylinux says how the libraries load on other
# distributions; `make check-wheels` finds a library that does not, and a wheel without kernels. It runs the wheel for
# aarch64 by Debian's qemu-user-static.
BUILD := PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m build --no-isolation
DEFINE := -C cmake.define.
FOR_x86_64 := $(DEFINE)CMAKE_CXX_COMPILER=c++
FOR_aarch64 := $(DEFINE)CMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ $(DEFINE)CMAKE_SYSTEM_NAME=Linux \
  $(DEFINE)CMAKE_SYSTEM_PROCESSOR=aarch64

wheels: sdist wheel-x86_64 wheel-aarch64 wheel-pure  ## the source archive and the three wheels, in dist

sdist: $(VENV)/installed
	rm -f dist/aftexport-*.tar.gz
	$(BUILD) --sdist --outdir dist

wheel-x86_64 wheel-aarch64: wheel-%: $(VENV)/installed
	rm -rf build/wheels/$* dist/aftexport-*_$*.whl
	_PYTHON_HOST_PLATFORM=manylinux_2_28-$* $(BUILD) --wheel --outdir dist -C build-dir=build/wheels/$* \
	  $(DEFINE)AFT_MANYLINUX=ON $(FOR_$*)

# Without kernels, for macOS and Windows; on Linux, pip prefers one of the others.
wheel-pure: $(VENV)/installed
	rm -f dist/aftexport-*-any.whl
	$(BUILD) --wheel --outdir dist -C wheel.cmake=false

# The libraries of `make cuda`, linked again.
cuda-wheel: cuda  ## the wheel aftexport-cuda with the CUDA kernels and TensorRT plugins, in dist
	rm -f dist/aftexport_cuda-*.whl
	_PYTHON_HOST_PLATFORM=manylinux_2_28-x86_64 $(BUILD) --wheel --outdir dist -C build-dir="$(CURDIR)/build/cuda" \
	  $(DEFINE)AFT_MANYLINUX=ON plugins/cuda

# The wheel is installed into the Python versions of this machine from 3.11 on, or into PYTHONS="3.11 3.12", with the
# packages of constraints.txt, or with the newest by UNPINNED=1. There a small bundle is verified and served, and with
# TORCH=1 a model is saved, exported, fused and served too; each version then downloads its torch, some gigabytes.
check-wheels: $(VENV)/installed  ## what is in dist: contents, symbols, and clean environments without a compiler
	@ls dist/*.whl > /dev/null 2>&1 || { echo "Expected wheels in dist, got none. Run: make wheels"; exit 1; }
	$(BIN)/pytest --durations 5 tests/wheels

## Measure

# BENCH="--mechanism aft_simple --tokens 4096": options of the benchmark; BENCH=--help shows all.
BENCH ?=
BENCHMARKS := PYTHONPATH=tests:tests/support:examples $(BIN)/python -m benchmarks

bench: $(VENV)/installed build/peers/installed  ## core operators against every peer, by length
	$(BENCHMARKS) $(BENCH)

bench-model: $(VENV)/installed build/peers/installed  ## the same for a whole model, in every precision
	$(BENCHMARKS) --model $(BENCH)

bench-quick: $(VENV)/installed build/peers/installed  ## core operators, the two shorter lengths
	$(BENCHMARKS) --quick $(BENCH)

# The whole table takes hours: BENCH="--shape modernbert --tokens 512 --contender aftexport_fp32 torch_sdpa" runs a part,
# and with --record it goes into this processor's record, beside the rows of other shapes and lengths.
bench-encoders: $(VENV)/installed build/peers/installed  ## encoders of transformers against every peer, in processes of their own
	$(BENCHMARKS) --encoders $(BENCH)

# Two hours on two cores, and no peers: it needs the licence texts of a package, which it downloads into build/documents.
# BENCH=--quick takes three minutes and fails if the recipe gains nothing; BENCH="--task conflict --seeds 1" runs a part.
bench-documents: $(VENV)/installed  ## whole documents against windows and truncation, on texts of licences
	$(BENCHMARKS).documents $(BENCH)

# BENCH="--tokens 1024 --rounds 1" fills the cache of torch.compile beforehand with bench-model. A record of another date
# or commit is replaced only by BENCH=--replace.
bench-record: $(VENV)/installed build/peers/installed  ## models into this processor's record, tables and pictures
	$(BENCHMARKS) --model --record --neighbour --rounds 5 $(BENCH)
	$(BENCHMARKS).tables

# Apart from .venv, and without the packages that .venv has. NNCF would send statistics by openvino-telemetry;
# tests/benchmarks/setup.py sets NNCF_CI, which prevents it.
build/peers/installed: tests/benchmarks/peers.txt $(VENV)/installed
	$(BIN)/pip install --quiet --upgrade --no-deps --target build/peers --requirement $<
	touch $@

# Answers, times and speed under load, against LitServe and plain FastAPI, and aftserve batch against a loop; some
# minutes. `make soak`: memory from round to round, a leak that must be found, stops under load, and all
# interfaces at once.
load: $(VENV)/installed build/contenders/installed  ## the server under load, against two others
	PYTHONPATH=tests:tests/support $(BIN)/python -m load

soak: $(VENV)/installed  ## the same for longer: memory, leaks, stops, all interfaces at once
	PYTHONPATH=tests:tests/support $(BIN)/python -m load --soak

# Apart from .venv: nothing of ours runs on what LitServe brings.
build/contenders/installed: tests/load/contenders.txt constraints.txt
	$(BIN)/pip install --quiet --upgrade --target build/contenders --constraint constraints.txt --requirement $<
	touch $@

# Other people's attention, for tests; without what else those packages ask for, which is much.
build/third_party/installed: tests/export/recognition/third_party.txt $(VENV)/installed
	$(BIN)/pip install --quiet --upgrade --no-deps --target build/third_party --requirement $<
	touch $@

## Develop

# The tests fail where a part between `<!-- reference: ... -->` and its end is not current; they are committed.
reference: $(VENV)/installed  ## the pages of commands, settings, operators and Python, written from the code
	PYTHONPATH=tests:tests/support $(BIN)/python -m docs.reference

# Strict: a warning, such as a link that leads nowhere, is an error.
docs: $(VENV)/installed  ## build the documentation into build/docs/html
	$(BIN)/python -m sphinx -W --keep-going -n -b html -d build/docs/doctrees docs build/docs/html

# From pyproject.toml, for the Python of Debian 12 and for those of the images. Versions that fit it stay:
# PINS=--upgrade takes the newest of all, PINS="--upgrade-package ruff" of one. Twice the same: the images' by constraints.txt.
PINS ?=
COMPILE = $(BIN)/uv pip compile pyproject.toml --quiet --no-config --no-annotate --custom-compile-command "make pins" $(PINS)
FOR_SUITE := --python-platform x86_64-manylinux_2_28 --python-version 3.11
FOR_IMAGES := --python-platform linux --python-version 3.12 --generate-hashes --constraint constraints.txt --extra serve --extra grpc
OF_CPU_IMAGE := $$(sed -n 's/^\([a-z0-9-]*\)==.*/--no-emit-package \1/p' docker/requirements.txt)
pins: $(BIN)/uv  ## constraints.txt, constraints-lowest.txt and the requirements of the images, written again
	$(COMPILE) $(FOR_SUITE) --group dev --group maintenance --extra $(subst $(comma), --extra ,$(EXTRAS)) \
	  --output-file constraints.txt
	$(COMPILE) $(FOR_SUITE) --resolution lowest-direct --no-deps --upgrade --no-emit-package torch \
	  --extra calibrate --extra client --extra cpu --extra grpc --extra torch --output-file constraints-lowest.txt
	echo onnxruntime | $(COMPILE) - $(FOR_IMAGES) --output-file docker/requirements.txt
	echo tensorrt | $(COMPILE) --excludes - $(FOR_IMAGES) --extra trt $(OF_CPU_IMAGE) \
	  --output-file docker/requirements-gpu.txt

$(BIN)/uv:
	test -d $(VENV) || "$(PYTHON)" -m venv $(VENV)
	$(BIN)/pip install --constraint constraints.txt uv

# The other C++ sources are aligned by hand.
CLANG_FORMATTED = $(shell find plugins/cpu plugins/cuda -name '*.cc' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

lint: $(VENV)/installed  ## ruff, clang-format, mypy, and linters of the page, the images and the workflows
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CLANG_FORMATTED)
	$(BIN)/oxlint serve/aftserve/api/page
	$(BIN)/hadolint docker/cpu.Dockerfile docker/gpu.Dockerfile
	$(BIN)/zizmor --offline --quiet .github
	$(BIN)/mypy

format: $(VENV)/installed  ## apply the fixes of ruff, and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CLANG_FORMATTED)

help:  ## list the targets by purpose
	@awk -F ':.*## ' '/^## / { heading = "\n" substr($$0, 4) "\n" } \
	  /^[a-z]/ && NF == 2 { printf "%s  make %-16s%s\n", heading, $$1, $$2; heading = "" }' Makefile

clean:  ## remove .venv and build
	rm -rf $(VENV) build

# By pip only the Python packages; the kernels are built apart, in a folder that is kept, so a change compiles one source.
# They are compiled as deep in build as `make test-native` and the wheels do: the paths that ccache compares are relative
# to the folder of the build. They are installed where this environment looks first.
$(VENV)/installed: $(VENV)/packages
$(VENV)/light: $(VENV)/light-packages
$(VENV)/installed $(VENV)/light: $(NATIVE)
	$(BIN)/cmake -S plugins -B build/kernels/cpu -G Ninja -DCMAKE_MAKE_PROGRAM="$(CURDIR)/$(BIN)/ninja" \
	  -DSKBUILD_PROJECT_VERSION="$$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)"
	$(BIN)/cmake --build build/kernels/cpu --parallel 2
	$(BIN)/cmake --install build/kernels/cpu \
	  --prefix "$$($(BIN)/python -c 'import aftplugins; print(next(iter(aftplugins.__path__)) + "/..")')"
	@$(BIN)/python -c 'import aftplugins; print(aftplugins.missing("onnxruntime") or "The fused kernels are built.")'
	touch $@

# .venv/light has no Ray, no TensorRT-RTX and no browser's driver.
$(VENV)/light-packages: GROUP := test
$(VENV)/light-packages: EXTRAS := demo,grpc

$(VENV)/packages $(VENV)/light-packages: pyproject.toml constraints.txt
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "aftexport needs Python 3.11 or newer; run: make PYTHON=/path/to/python3.11"; exit 1; }
	test -d $(VENV) || "$(PYTHON)" -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt 'pip>=25.1'  # which knows groups
	$(BIN)/pip install --constraint constraints.txt --config-settings wheel.cmake=false \
	  --group $(GROUP) --editable '.[$(EXTRAS)]'
	touch $@
