# h200, stack pro-grpo: GRPO of DeepSeek-V4 with vLLM and Megatron-Bridge, as the published Pro runs on H100 and GB200.
# Rendered from templates/Dockerfile.j2 and containers/stack.yaml, which has every pin with its reason; docs/images.md
# says how it is built.

# nvidia/cuda:13.0.2-devel-ubuntu24.04, by its digest: CUDA 13.0 is what torch 2.13's wheels are built for; devel,
# because DeepGEMM, FlashInfer and TileLang compile kernels while they run; without cuDNN, so that the wheel's is the
# only one; glibc 2.39, which nvidia-resiliency-ext's wheel needs.
ARG BASE_IMAGE=nvidia/cuda:13.0.2-devel-ubuntu24.04@sha256:5dc1bca23d05bd37b011be68ec470c03b403a5da07ec3a86e41af9470e9d0cc6

# The distribution's packages, and the one environment everything goes into.
FROM ${BASE_IMAGE} AS system
ENV LANG=C.UTF-8 PIP_NO_CACHE_DIR=1 PIP_NO_INPUT=1 PIP_PROGRESS_BAR=off PIP_DISABLE_PIP_VERSION_CHECK=1
ENV PATH=/opt/venv/bin:${PATH}
RUN set -eu; \
    export DEBIAN_FRONTEND=noninteractive; \
    apt-get update; \
    apt-get install -y --no-install-recommends \
        build-essential \
        ca-certificates \
        git \
        ibverbs-providers \
        libibverbs1 \
        libnuma1 \
        librdmacm1 \
        ninja-build \
        numactl \
        python3.12 \
        python3.12-dev \
        python3.12-venv; \
    rm -rf /var/lib/apt/lists/*; \
    python3.12 -m venv /opt/venv; \
    python -c 'import sys; assert "%d.%d" % sys.version_info[:2] == "3.12", sys.version'

# Every package by version and hash: first what sdists are built with, and what is compiled with, ...
FROM system AS compilable
COPY requirements/build.txt requirements/compile_with.txt /opt/dsv4kit/requirements/
RUN --mount=type=cache,id=dsv4kit-pip,target=/root/.cache/pip,sharing=locked set -eu; \
    unset PIP_NO_CACHE_DIR; \
    pip install --no-deps --require-hashes --requirement /opt/dsv4kit/requirements/build.txt
RUN --mount=type=cache,id=dsv4kit-pip,target=/root/.cache/pip,sharing=locked set -eu; \
    unset PIP_NO_CACHE_DIR; \
    pip install --no-deps --require-hashes --no-build-isolation --requirement /opt/dsv4kit/requirements/compile_with.txt
# A base without CUDA (plain Ubuntu) takes the compiler and headers of the lock, in the toolkit's own layout, with its stub
# of the driver (every function says 34, CUDA_ERROR_STUB_LIBRARY), which is linked against, and proved with.
RUN set -eu; \
    if [ -e /usr/local/cuda ]; then exit 0; fi; \
    cuda=/opt/venv/lib/python3.12/site-packages/nvidia/cu13; \
    "${cuda}/bin/nvcc" --version; \
    mkdir "${cuda}/targets"; \
    ln -s .. "${cuda}/targets/x86_64-linux"; \
    ln -s lib "${cuda}/lib64"; \
    mkdir "${cuda}/lib/stubs"; \
    grep -ohE '\bcu[A-Z][A-Za-z0-9_]*\b' "${cuda}/include/cuda.h" > /tmp/stub.c; \
    sort -u -o /tmp/stub.c /tmp/stub.c; \
    sed -i 's/.*/int &(void) { return 34; }/' /tmp/stub.c; \
    gcc -shared -fPIC -w -Wl,-soname,libcuda.so.1 /tmp/stub.c -o "${cuda}/lib/stubs/libcuda.so"; \
    rm /tmp/stub.c; \
    for library in "${cuda}"/lib/lib*.so.*; do \
        name="${library%%.so.*}.so"; \
        if [ ! -e "${name}" ]; then ln -s "${library##*/}" "${name}"; fi; \
    done; \
    ln -s "${cuda}" /usr/local/cuda

# ... then the rest.
FROM compilable AS packages
COPY requirements/packages.txt /opt/dsv4kit/requirements/
RUN --mount=type=cache,id=dsv4kit-pip,target=/root/.cache/pip,sharing=locked set -eu; \
    unset PIP_NO_CACHE_DIR; \
    pip install --no-deps --require-hashes --no-build-isolation --requirement /opt/dsv4kit/requirements/packages.txt

# Sources without kernels of their own.
FROM system AS sources
# megatron-core: dev of 3 August 2026, which .dev.commit of Megatron-Bridge 0.6.0 names; a resume with the optimizer is
# equal in both checkpoint formats, and of fd1121b8 fully_reshardable cannot be loaded (docs/fixes/optimizer-state.md).
ARG MEGATRON_CORE_SOURCE=https://github.com/NVIDIA/Megatron-LM
COPY sources/megatron-core /src/given/megatron-core
RUN set -eu; \
    if [ -d /src/given/megatron-core/tree ]; then \
        rm -rf /src/megatron-core; \
        mv /src/given/megatron-core/tree /src/megatron-core; \
    else \
        git init --quiet /src/megatron-core; \
        git -C /src/megatron-core fetch --quiet --depth=1 "${MEGATRON_CORE_SOURCE}" 43e45e13074f36da68b34c7a189cd997a01d1b41; \
        git -C /src/megatron-core checkout --quiet --detach FETCH_HEAD; \
        test "$(git -C /src/megatron-core rev-parse HEAD)" = 43e45e13074f36da68b34c7a189cd997a01d1b41; \
    fi; \
    mkdir -p /src/shas; \
    echo 43e45e13074f36da68b34c7a189cd997a01d1b41 > /src/shas/megatron-core; \
    rm -rf /src/megatron-core/.git
# megatron-bridge: tag v0.6.0, the series of the published GB200 runs (0.6.2, whose V4 provider is the same); all that
# its provider sets is a field of Megatron-LM 43e45e13.
ARG MEGATRON_BRIDGE_SOURCE=https://github.com/NVIDIA-NeMo/Megatron-Bridge
COPY sources/megatron-bridge /src/given/megatron-bridge
RUN set -eu; \
    if [ -d /src/given/megatron-bridge/tree ]; then \
        rm -rf /src/megatron-bridge; \
        mv /src/given/megatron-bridge/tree /src/megatron-bridge; \
    else \
        git init --quiet /src/megatron-bridge; \
        git -C /src/megatron-bridge fetch --quiet --depth=1 "${MEGATRON_BRIDGE_SOURCE}" 51885cf132b2814188b6855c25a8588254274c2a; \
        git -C /src/megatron-bridge checkout --quiet --detach FETCH_HEAD; \
        test "$(git -C /src/megatron-bridge rev-parse HEAD)" = 51885cf132b2814188b6855c25a8588254274c2a; \
    fi; \
    mkdir -p /src/shas; \
    echo 51885cf132b2814188b6855c25a8588254274c2a > /src/shas/megatron-bridge; \
    rm -rf /src/megatron-bridge/.git
# verl: #8234 (start rank, for vLLM from 0.28 on) and #8235 (resume of an offloaded optimizer); no release has both.
ARG VERL_SOURCE=https://github.com/verl-project/verl
ARG VERL_SHA
COPY sources/verl /src/given/verl
RUN set -eu; \
    if ! expr "${VERL_SHA}" : '[0-9a-f]\{40\}$' > /dev/null; then \
        echo "VERL_SHA: a full commit sha is needed, not '${VERL_SHA}'" >&2; exit 1; \
    fi; \
    if [ -d /src/given/verl/tree ]; then \
        mv /src/given/verl/tree /src/verl; \
    else \
        git clone --quiet --no-checkout --filter=blob:none "${VERL_SOURCE}" /src/verl; \
        git -C /src/verl checkout --quiet --detach "${VERL_SHA}"; \
        for commit in 3dd97a0 0bd668c; do \
            git -C /src/verl merge-base --is-ancestor "${commit}" HEAD || \
                { echo "VERL_SHA: verl at ${VERL_SHA} is without ${commit}" >&2; exit 1; }; \
        done; \
    fi; \
    mkdir -p /src/shas; \
    echo "${VERL_SHA}" > /src/shas/verl; \
    rm -rf /src/verl/.git

# Whether all of it fits together, seen before an hour of compiling: what the models need, imports, verl's own checks.
FROM packages AS early
COPY --from=sources /src /src
RUN set -eu; \
    pip install --no-deps --no-build-isolation /src/megatron-core /src/megatron-bridge /src/verl; \
    rm -rf /src
COPY kit /opt/dsv4kit/kit
COPY image.json /opt/dsv4kit/image.json
# The file says nothing and is always the same, so that what waits for it is not compiled again.
RUN set -eu; \
    printf '/opt/dsv4kit/kit\n' > /opt/venv/lib/python3.12/site-packages/dsv4kit.pth; \
    python -m dsv4kit.image.manifest --early /opt/dsv4kit; \
    mkdir /opt/early; \
    printf 'fits\n' > /opt/early/proof; \
    touch -d @315532800 /opt/early/proof /opt/early

# What is compiled, against this torch and for h200 alone; the slowest part (an hour and more).
FROM compilable AS kernels
COPY --from=early /opt/early/proof /opt/early/proof
# A compiler of CUTLASS kernels takes up to 8 GB: 4 x 2 of them fit into 64 GB. FlashMLA's own default is 32 threads.
ARG MAX_JOBS=4
ARG NVCC_THREADS=2
ENV CUDA_HOME=/usr/local/cuda \
    TORCH_CUDA_ARCH_LIST="9.0" \
    NVTE_CUDA_ARCHS="90" \
    NVTE_FRAMEWORK=pytorch \
    NVTE_PYTORCH_FORCE_BUILD=TRUE \
    FAST_HADAMARD_TRANSFORM_FORCE_BUILD=TRUE \
    FLASH_MLA_DISABLE_SM100=TRUE
# CUDA 13 keeps CUB, Thrust and libcu++ in a directory of their own.
ENV CPATH=/usr/local/cuda/targets/x86_64-linux/include/cccl:/opt/venv/lib/python3.12/site-packages/nvidia/cudnn/include:/opt/venv/lib/python3.12/site-packages/nvidia/nccl/include \
    CUDNN_PATH=/opt/venv/lib/python3.12/site-packages/nvidia/cudnn
# Transformer Engine takes the system's cuDNN before the wheel's, which torch uses: there may be none.
RUN set -eu; \
    case "$(ldconfig -p)" in \
        *libcudnn.so*) echo "BASE_IMAGE has a cuDNN of its own; take one without" >&2; exit 1 ;; \
    esac
COPY requirements/compiled.txt /opt/dsv4kit/requirements/
COPY wheels/packages /src/ready/packages
RUN set -eu; \
    mkdir -p /wheels/packages; \
    set -- /src/ready/packages/*.whl; \
    if [ -e "$1" ]; then cp "$@" /wheels/packages/; exit 0; fi; \
    pip wheel --no-deps --require-hashes --no-build-isolation --wheel-dir /wheels/packages \
        --requirement /opt/dsv4kit/requirements/compiled.txt
# fast-hadamard-transform: tag v1.1.0; Megatron-Core's sparse attention imports it.
ARG FAST_HADAMARD_TRANSFORM_SOURCE=https://github.com/Dao-AILab/fast-hadamard-transform
COPY sources/fast-hadamard-transform /src/given/fast-hadamard-transform
COPY wheels/fast-hadamard-transform /src/ready/fast-hadamard-transform
RUN set -eu; \
    mkdir -p /wheels/fast-hadamard-transform; \
    mkdir -p /src/shas; \
    echo 1cc807efbd6cc001df359822d60bf6052dd66859 > /src/shas/fast-hadamard-transform; \
    set -- /src/ready/fast-hadamard-transform/*.whl; \
    if [ -e "$1" ]; then cp "$@" /wheels/fast-hadamard-transform/; exit 0; fi; \
    if [ -d /src/given/fast-hadamard-transform/tree ]; then \
        rm -rf /src/fast-hadamard-transform; \
        mv /src/given/fast-hadamard-transform/tree /src/fast-hadamard-transform; \
    else \
        git init --quiet /src/fast-hadamard-transform; \
        git -C /src/fast-hadamard-transform fetch --quiet --depth=1 "${FAST_HADAMARD_TRANSFORM_SOURCE}" 1cc807efbd6cc001df359822d60bf6052dd66859; \
        git -C /src/fast-hadamard-transform checkout --quiet --detach FETCH_HEAD; \
        test "$(git -C /src/fast-hadamard-transform rev-parse HEAD)" = 1cc807efbd6cc001df359822d60bf6052dd66859; \
    fi; \
    pip wheel --no-deps --no-build-isolation --wheel-dir /wheels/fast-hadamard-transform /src/fast-hadamard-transform
# flash-mla: nv_dev of 30 April 2026, which Megatron-Bridge 0.6 is built with; fused sparse attention needs it.
ARG FLASH_MLA_SOURCE=https://github.com/deepseek-ai/FlashMLA
ARG FLASH_MLA_CUTLASS_SOURCE=https://github.com/NVIDIA/cutlass
COPY sources/flash-mla-cutlass /src/given/flash-mla-cutlass
COPY sources/flash-mla /src/given/flash-mla
COPY wheels/flash-mla /src/ready/flash-mla
RUN set -eu; \
    mkdir -p /wheels/flash-mla; \
    mkdir -p /src/shas; \
    echo b7643bd54521f563b839b98289b5cd048c062ba2 > /src/shas/flash-mla; \
    set -- /src/ready/flash-mla/*.whl; \
    if [ -e "$1" ]; then cp "$@" /wheels/flash-mla/; exit 0; fi; \
    if [ -d /src/given/flash-mla/tree ]; then \
        rm -rf /src/flash-mla; \
        mv /src/given/flash-mla/tree /src/flash-mla; \
    else \
        git init --quiet /src/flash-mla; \
        git -C /src/flash-mla fetch --quiet --depth=1 "${FLASH_MLA_SOURCE}" b7643bd54521f563b839b98289b5cd048c062ba2; \
        git -C /src/flash-mla checkout --quiet --detach FETCH_HEAD; \
        test "$(git -C /src/flash-mla rev-parse HEAD)" = b7643bd54521f563b839b98289b5cd048c062ba2; \
        test "$(git -C /src/flash-mla rev-parse HEAD:csrc/cutlass)" = 147f5673d0c1c3dcf66f78d677fd647e4a020219; \
    fi; \
    if [ -d /src/given/flash-mla-cutlass/tree ]; then \
        rm -rf /src/flash-mla/csrc/cutlass; \
        mv /src/given/flash-mla-cutlass/tree /src/flash-mla/csrc/cutlass; \
    else \
        git init --quiet /src/flash-mla/csrc/cutlass; \
        git -C /src/flash-mla/csrc/cutlass fetch --quiet --depth=1 "${FLASH_MLA_CUTLASS_SOURCE}" 147f5673d0c1c3dcf66f78d677fd647e4a020219; \
        git -C /src/flash-mla/csrc/cutlass checkout --quiet --detach FETCH_HEAD; \
        test "$(git -C /src/flash-mla/csrc/cutlass rev-parse HEAD)" = 147f5673d0c1c3dcf66f78d677fd647e4a020219; \
    fi; \
    pip wheel --no-deps --no-build-isolation --wheel-dir /wheels/flash-mla /src/flash-mla

# What was compiled, alone: kept, and used again by another build with the same sources, torch and processor.
FROM scratch AS wheels
COPY --from=kernels /wheels /wheels

# Everything that trains.
FROM packages AS trainer
COPY --from=kernels /wheels /src/wheels
COPY --from=kernels /src/shas /opt/dsv4kit/shas
RUN set -eu; \
    pip install --no-deps --no-index /src/wheels/*/*.whl; \
    rm -rf /src/wheels
COPY --from=sources /src /src
RUN set -eu; \
    pip install --no-deps --no-build-isolation /src/megatron-core /src/megatron-bridge /src/verl; \
    mv /src/shas/* /opt/dsv4kit/shas/; \
    rm -rf /src

# The kit, and the proof. A run brings its own copy of the kit, which comes first; this one serves the checks.
FROM trainer AS image
# What the container's toolkit mounts; and where kernels that are compiled while training runs find CUDA.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    CUDA_HOME=/usr/local/cuda \
    CPATH=/usr/local/cuda/targets/x86_64-linux/include/cccl
COPY kit /opt/dsv4kit/kit
COPY image.json /opt/dsv4kit/image.json
# enroot starts a login shell, whose /etc/profile sets another PATH.
RUN set -eu; \
    printf 'export PATH=%s\n' "${PATH}" > /etc/profile.d/00-image-path.sh; \
    printf '/opt/dsv4kit/kit\n' > /opt/venv/lib/python3.12/site-packages/dsv4kit.pth
RUN set -eu; \
    python -m dsv4kit.image.manifest /opt/dsv4kit
ARG VERL_SHA
ARG STACK_HASH
ARG KIT_REVISION=""
LABEL org.opencontainers.image.title="dsv4kit h200" \
      org.opencontainers.image.revision="${KIT_REVISION}" \
      dsv4kit.hardware="h200" \
      dsv4kit.architecture="x86_64" \
      dsv4kit.stack="pro-grpo" \
      dsv4kit.git.fast-hadamard-transform="1cc807efbd6cc001df359822d60bf6052dd66859" \
      dsv4kit.git.flash-mla="b7643bd54521f563b839b98289b5cd048c062ba2" \
      dsv4kit.git.megatron-core="43e45e13074f36da68b34c7a189cd997a01d1b41" \
      dsv4kit.git.megatron-bridge="51885cf132b2814188b6855c25a8588254274c2a" \
      dsv4kit.git.verl="${VERL_SHA}" \
      dsv4kit.stack-hash="${STACK_HASH}"
WORKDIR /opt/dsv4kit
# The base's would print a banner, and run what it likes, before each command.
ENTRYPOINT []
CMD ["/bin/bash"]
