# cpu, stack cpu: what HW=cpu trains with, the same packages as `make runtime` installs. Rendered from
# templates/Dockerfile.j2 and containers/stack.yaml, which has every pin with its reason; docs/images.md says how it is
# built.

# debian:bookworm-slim, by its digest: Python 3.11 from the distribution; one is made with debootstrap where no
# registry can be reached.
ARG BASE_IMAGE

# The distribution's packages, and the one environment everything goes into.
FROM ${BASE_IMAGE} AS system
ENV LANG=C.UTF-8 PIP_NO_CACHE_DIR=1 PIP_NO_INPUT=1 PIP_PROGRESS_BAR=off PIP_DISABLE_PIP_VERSION_CHECK=1
ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
RUN set -eu; \
    export DEBIAN_FRONTEND=noninteractive; \
    apt-get update; \
    apt-get install -y --no-install-recommends \
        ca-certificates \
        libnuma1 \
        python3 \
        python3-venv; \
    rm -rf /var/lib/apt/lists/*; \
    python3 -m venv /opt/venv; \
    python -c 'import sys; assert "%d.%d" % sys.version_info[:2] == "3.11", sys.version'

# Every package by version and hash. torch first: its CPU wheel comes from wherever pip finds it.
FROM system AS packages
ARG TORCH_INDEX=""
COPY requirements/cpu-torch.txt requirements/cpu-runtime.lock /opt/dsv4kit/requirements/
RUN --mount=type=cache,id=dsv4kit-pip,target=/root/.cache/pip,sharing=locked set -eu; \
    unset PIP_NO_CACHE_DIR; \
    pip install --no-deps ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} --requirement /opt/dsv4kit/requirements/cpu-torch.txt; \
    if ! grep -Eq '^cuda.* = None$' /opt/venv/lib/python3.11/site-packages/torch/version.py; then \
        echo "pip found a torch for CUDA; TORCH_INDEX has to name an index with CPU builds" >&2; exit 1; \
    fi
RUN --mount=type=cache,id=dsv4kit-pip,target=/root/.cache/pip,sharing=locked set -eu; \
    unset PIP_NO_CACHE_DIR; \
    pip install --no-deps --require-hashes --requirement /opt/dsv4kit/requirements/cpu-runtime.lock

# The kit, and the proof. A run brings its own copy of the kit, which comes first; this one serves the checks.
FROM packages AS image
COPY kit /opt/dsv4kit/kit
COPY image.json /opt/dsv4kit/image.json
# enroot starts a login shell, whose /etc/profile sets another PATH.
RUN set -eu; \
    printf 'export PATH=%s\n' "${PATH}" > /etc/profile.d/00-image-path.sh; \
    printf '/opt/dsv4kit/kit\n' > /opt/venv/lib/python3.11/site-packages/dsv4kit.pth
RUN set -eu; \
    python -m dsv4kit.image.manifest /opt/dsv4kit
ARG STACK_HASH
ARG KIT_REVISION=""
LABEL org.opencontainers.image.title="dsv4kit cpu" \
      org.opencontainers.image.revision="${KIT_REVISION}" \
      dsv4kit.hardware="cpu" \
      dsv4kit.architecture="x86_64" \
      dsv4kit.stack="cpu" \
      dsv4kit.stack-hash="${STACK_HASH}"
WORKDIR /opt/dsv4kit
CMD ["/bin/bash"]
