# syntax=docker/dockerfile:1
# spaceserve on an NVIDIA GPU (driver 580 or newer):
#
#   docker build -t spaceserve .
#   docker run --gpus all -p 8080:8080 -v spaceserve-data:/data spaceserve
#
# Layers go from what changes least to what changes most: a change in the source rebuilds only the last two.
# torch brings its own CUDA libraries, so the base image needs none.
ARG BASE=nvidia/cuda:13.0.3-base-ubuntu24.04

FROM ${BASE} AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY docker/install.sh docker/
COPY docker/locks/installed.py docker/locks/torch.txt docker/locks/
RUN --mount=type=cache,target=/root/.cache/pip \
    docker/install.sh --venv /opt/spaceserve --device cuda --stages "environment torch"
COPY docker/locks/run.txt docker/locks/
RUN --mount=type=cache,target=/root/.cache/pip \
    docker/install.sh --venv /opt/spaceserve --device cuda --stages dependencies
COPY LICENSE README.md pyproject.toml ./
COPY proto proto
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
COPY --chmod=755 docker/entrypoint.sh /usr/local/bin/entrypoint.sh
# Downloaded weights and compiled kernels live in /data; everything else may be mounted read-only (with a tmpfs at /tmp).
ENV PATH=/opt/spaceserve/bin:$PATH \
    HF_HOME=/data/huggingface \
    TRITON_CACHE_DIR=/data/triton \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
VOLUME /data
WORKDIR /data
USER 10001
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --start-interval=2s --retries=3 \
    CMD ["entrypoint.sh", "healthcheck"]
ENTRYPOINT ["entrypoint.sh"]
CMD ["serve"]
