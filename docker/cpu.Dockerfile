# syntax=docker/dockerfile:1
# spaceserve on a CPU:
#
#   docker build -f docker/cpu.Dockerfile -t spaceserve-cpu .
#   docker run -p 8080:8080 -v spaceserve-data:/data spaceserve-cpu
ARG BASE=python:3.12-slim

FROM ${BASE} AS build
WORKDIR /src
COPY docker/install.sh docker/
COPY docker/locks/installed.py docker/locks/torch.txt docker/locks/
RUN --mount=type=cache,target=/root/.cache/pip \
    docker/install.sh --venv /opt/spaceserve --device cpu --stages "environment torch"
COPY docker/locks/run.txt docker/locks/
RUN --mount=type=cache,target=/root/.cache/pip \
    docker/install.sh --venv /opt/spaceserve --device cpu --stages dependencies
COPY proto proto
# The default model's weights, checked by their hashes, beside the environment: nothing is fetched at a start.
RUN PYTHONPATH=proto /opt/spaceserve/bin/python -P -m space_common.default_model
COPY LICENSE README.md pyproject.toml ./
COPY kernels kernels
COPY router router
COPY server server
RUN docker/install.sh --venv /opt/spaceserve --device cpu --stages project --no-editable
# Our own operations for every kind of processor of this architecture; the image itself needs no compiler.
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && /opt/spaceserve/bin/python -P -m space_kernels.build.cpu_library

FROM ${BASE}
RUN useradd --uid 10001 --no-create-home --home-dir /data --shell /usr/sbin/nologin spaceserve \
    && install --directory --owner spaceserve --group spaceserve /data
COPY --from=build /opt/spaceserve /opt/spaceserve
COPY --chmod=755 docker/image/entrypoint.py /usr/local/bin/entrypoint.py
# Other models live in /data; everything else may be mounted read-only (with a tmpfs at /tmp).
ENV PATH=/opt/spaceserve/bin:$PATH \
    HF_HOME=/data/huggingface \
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
