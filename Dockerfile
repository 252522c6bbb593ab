# syntax=docker/dockerfile:1
# spaceserve on an NVIDIA GPU (driver 580 or newer):
#
#   docker build -t spaceserve .
#   docker run --gpus all -p 8080:8080 -v spaceserve-data:/data spaceserve
#
# Layers go from what changes least to what changes most: a change in the source rebuilds only the last ones.
# torch brings its own CUDA libraries, so the base image needs none.
#
# Attention is our own Triton kernel. flash-attn 2, which takes pages of 256 tokens only, can be compiled beside it in a
# stage with CUDA's compiler, once, until torch or the pinned version changes. That is long, and each of MAX_JOBS jobs
# takes gigabytes (by flash-attn's own account up to 9):
#
#   docker build --build-arg FLASH_ATTN=with --build-arg MAX_JOBS=16 -t spaceserve .
ARG BASE=nvidia/cuda:13.0.3-base-ubuntu24.04
ARG CUDA=nvidia/cuda:13.0.3-devel-ubuntu24.04
ARG FLASH_ATTN=without

FROM ${BASE} AS torch
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY docker/install.sh docker/
COPY docker/locks/installed.py docker/locks/torch.txt docker/locks/
RUN --mount=type=cache,target=/root/.cache/pip \
    docker/install.sh --venv /opt/spaceserve --device cuda --stages "environment torch"

# Wheels, for 8.0 and 9.0: what is compiled for 8.0 also runs on 8.6 and 8.9.
FROM ${CUDA} AS flash-attn-with
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends python3 python3-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=torch /opt/spaceserve /opt/spaceserve
COPY docker/flash-attn.txt /src/
ARG MAX_JOBS=4
ENV CUDA_HOME=/usr/local/cuda \
    FLASH_ATTENTION_FORCE_BUILD=TRUE \
    FLASH_ATTN_CUDA_ARCHS="80;90" \
    MAX_JOBS=${MAX_JOBS} \
    NVCC_THREADS=2
RUN /opt/spaceserve/bin/python -m pip install --no-cache-dir \
        ninja==1.13.2 packaging==26.3 setuptools==84.2.1 wheel==0.48.0 \
    && PATH=/opt/spaceserve/bin:$PATH python -m pip wheel --no-cache-dir --no-deps --no-build-isolation \
        --require-hashes --requirement /src/flash-attn.txt --wheel-dir /wheels

FROM ${BASE} AS flash-attn-without
RUN mkdir /wheels

# hadolint ignore=DL3006
FROM flash-attn-${FLASH_ATTN} AS flash-attn

FROM torch AS build
COPY docker/locks/run.txt docker/locks/
RUN --mount=type=cache,target=/root/.cache/pip \
    docker/install.sh --venv /opt/spaceserve --device cuda --stages dependencies
COPY --from=flash-attn /wheels /wheels
RUN find /wheels -name '*.whl' -exec /opt/spaceserve/bin/python -m pip install --no-cache-dir --no-deps --no-index {} +
COPY proto proto
# The default model's weights, checked by their hashes, beside the environment: nothing is fetched at a start.
RUN PYTHONPATH=proto /opt/spaceserve/bin/python -P -m space_common.default_model
COPY LICENSE README.md pyproject.toml ./
COPY kernels kernels
COPY router router
COPY server server
RUN docker/install.sh --venv /opt/spaceserve --device cuda --stages project --no-editable

FROM ${BASE}
# Triton compiles small C launchers while the server runs: a compiler and Python's headers belong to the image.
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends gcc libc6-dev python3 python3-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --no-create-home --home-dir /data --shell /usr/sbin/nologin spaceserve \
    && install --directory --owner spaceserve --group spaceserve /data
COPY --from=build /opt/spaceserve /opt/spaceserve
COPY --chmod=755 docker/image/entrypoint.py /usr/local/bin/entrypoint.py
# Other models and compiled kernels live in /data; everything else may be mounted read-only (with a tmpfs at /tmp).
ENV PATH=/opt/spaceserve/bin:$PATH \
    HF_HOME=/data/huggingface \
    TRITON_CACHE_DIR=/data/triton \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    SPACESERVE_WORKERS=auto \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONSAFEPATH=1 \
    PYTHONUNBUFFERED=1
VOLUME /data
WORKDIR /data
USER 10001
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --start-interval=2s --retries=3 \
    CMD ["entrypoint.py", "healthcheck"]
ENTRYPOINT ["entrypoint.py"]
CMD ["serve"]
