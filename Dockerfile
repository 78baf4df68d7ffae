# syntax=docker/dockerfile:1
# Three images from one file. Default target: CUDA 11.1, for cards from Kepler to Ampere (and Ada) with drivers from
# 450.80.02 on. `--target modern`: CUDA 13, for Turing to Blackwell with drivers from 580 on. `--target match`: matching
# alone, on the CPU. docs/containers.md.
#
#   docker build -t superglue-sift:cu111 .
#   docker build -t superglue-sift:modern --target modern .
#   docker build -t superglue-match --target match .
#
# Base images stand here by digest, but for NVIDIA's, whose digest nobody publishes. The torch wheels carry their own CUDA
# libraries, so that `--build-arg BASE_IMAGE=ubuntu:20.04` works as well, should NVIDIA's tag be gone.
ARG BASE_IMAGE=nvidia/cuda:11.1.1-cudnn8-runtime-ubuntu20.04
ARG MODERN_BASE_IMAGE=debian:bookworm-slim@sha256:3783cc01769c7b2b1b83a5c5ad96c815348e28ed7da68e2e3687004faa906251

# ----------------------------------------------------------------------------------------------------- match
FROM ${MODERN_BASE_IMAGE} AS match
ARG MODERN_BASE_IMAGE
ARG SOURCE_DATE_EPOCH=1767225600
ENV DEBIAN_FRONTEND=noninteractive \
    PATH=/opt/venv/bin:$PATH

RUN apt-get update \
    && apt-get install -y --no-install-recommends python3.11 python3.11-venv tini \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/apt /var/log/dpkg.log

WORKDIR /opt/superglue
ARG TORCH_LOCK=docker/locks/torch-match.lock
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY docker/locks docker/locks
# Headers, tests and tools of a compiler, 290 MB, serve nothing here; `import torch` looks for torch_shm_manager.
RUN --mount=type=cache,target=/root/.cache/pip \
    python3.11 -m venv /opt/venv \
    && pip install --disable-pip-version-check --no-deps ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} -r "$TORCH_LOCK" \
    && pip install --disable-pip-version-check --require-hashes --no-deps -r docker/locks/match.lock \
    && pip check \
    && packages=/opt/venv/lib/python3.11/site-packages \
    && rm -rf "$packages/torch/include" "$packages/torch/test" \
    && find "$packages/torch/bin" -type f ! -name torch_shm_manager -delete \
    && find "$packages/numpy" "$packages/scipy" "$packages/sympy" "$packages/networkx" \
        -type d -name tests -prune -exec rm -rf {} +

RUN useradd --uid 1000 --create-home --shell /bin/bash matcher \
    && install -d -m 0777 /photos
COPY LICENSE ./
COPY pretrained pretrained
COPY superglue_sift superglue_sift
ARG VERSION=0.1.0
ARG VCS_REF=unknown
LABEL org.opencontainers.image.title="superglue-match" \
      org.opencontainers.image.description="Match photographs with SuperGlue on SIFT keypoints, on the CPU" \
      org.opencontainers.image.licenses="MIT" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${VCS_REF}" \
      org.opencontainers.image.base.name="${MODERN_BASE_IMAGE}" \
      superglue.stack="match"
# USER and HOME let any `--user` run without an entry in passwd.
ENV USER=matcher \
    HOME=/tmp \
    PYTHONPATH=/opt/superglue \
    PYTHONUNBUFFERED=1
USER 1000
WORKDIR /photos
ENTRYPOINT ["tini", "--", "python", "-m", "superglue_sift"]
CMD ["--help"]

# ---------------------------------------------------------------------------------------------------- modern
FROM ${MODERN_BASE_IMAGE} AS modern
ARG MODERN_BASE_IMAGE
ARG SOURCE_DATE_EPOCH=1767225600
ARG TORCH_LOCK=docker/locks/torch-modern.lock
ENV DEBIAN_FRONTEND=noninteractive \
    PATH=/opt/venv/bin:$PATH

RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        ca-certificates git libgl1 libglib2.0-0 python3.11 python3.11-venv tini \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/apt /var/log/dpkg.log \
    && git config --system --add safe.directory '*'

WORKDIR /opt/superglue
COPY requirements/modern.lock requirements/torch.in requirements/
COPY docker/locks docker/locks
RUN --mount=type=cache,target=/root/.cache/pip \
    python3.11 -m venv /opt/venv \
    && pip install --disable-pip-version-check --no-deps -r "$TORCH_LOCK" \
    && pip install --disable-pip-version-check --require-hashes --no-deps -r requirements/modern.lock \
    && pip install --disable-pip-version-check --require-hashes --no-deps -r docker/locks/dali-modern.lock \
    && case "$TORCH_LOCK" in *.lock) pip check ;; esac

RUN useradd --uid 1000 --create-home --shell /bin/bash pipeline \
    && mkdir -p /workspace \
    && chmod 0777 /home/pipeline /workspace
COPY . .
ARG VERSION=0.1.0
ARG VCS_REF=unknown
LABEL org.opencontainers.image.title="superglue-sift" \
      org.opencontainers.image.description="SuperGlue on SIFT keypoints: DVC, torchrun, MLflow; CUDA 13" \
      org.opencontainers.image.licenses="MIT" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${VCS_REF}" \
      org.opencontainers.image.base.name="${MODERN_BASE_IMAGE}" \
      superglue.stack="modern"
# USER and HOME let any `--user` run git and dvc without an entry in passwd.
ENV USER=pipeline \
    HOME=/home/pipeline \
    PYTHONPATH=/opt/superglue \
    PYTHONUNBUFFERED=1 \
    DVC_NO_ANALYTICS=true \
    DO_NOT_TRACK=true \
    MLFLOW_DISABLE_TELEMETRY=true \
    MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false \
    MLFLOW_TRACKING_URI=sqlite:////workspace/mlflow.db \
    IMAGE_STACK=modern \
    IMAGE_REVISION="${VCS_REF}" \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000
WORKDIR /workspace
ENTRYPOINT ["tini", "--", "python", "/opt/superglue/docker/entrypoint.py"]
CMD ["repro"]

# ----------------------------------------------------------------------------------------------------- cu111
FROM ${BASE_IMAGE} AS cu111
ARG BASE_IMAGE
ARG SOURCE_DATE_EPOCH=1767225600
ARG TORCH_LOCK=docker/locks/torch-cu111.lock
ARG TORCH_LINKS=https://download.pytorch.org/whl/cu111/torch_stable.html
ENV DEBIAN_FRONTEND=noninteractive \
    PATH=/opt/venv/bin:$PATH

# NVIDIA changed the key of its apt repository in 2022, which breaks `apt-get update` on older copies of its images.
# Nothing is installed from there.
RUN rm -f /etc/apt/sources.list.d/cuda*.list /etc/apt/sources.list.d/nvidia-ml*.list \
    && apt-get update \
    && apt-get install -y --no-install-recommends \
        ca-certificates git libgl1 libglib2.0-0 python3-distutils python3.9 python3.9-venv tini \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/apt /var/log/dpkg.log \
    && git config --system --add safe.directory '*'

WORKDIR /opt/superglue
COPY requirements/cu111.lock requirements/torch.in requirements/
COPY docker/locks docker/locks
# pip 20.0 of Ubuntu 20.04 is too old for today's wheels.
RUN --mount=type=cache,target=/root/.cache/pip \
    python3.9 -m venv /opt/venv \
    && pip install --disable-pip-version-check --require-hashes --no-deps -r docker/locks/pip.lock \
    && pip install --disable-pip-version-check --no-deps --find-links "$TORCH_LINKS" -r "$TORCH_LOCK" \
    && pip install --disable-pip-version-check --require-hashes --no-deps -r requirements/cu111.lock \
    && pip install --disable-pip-version-check --require-hashes --no-deps -r docker/locks/dali-cu111.lock \
    && pip check

RUN useradd --uid 1000 --create-home --shell /bin/bash pipeline \
    && mkdir -p /workspace \
    && chmod 0777 /home/pipeline /workspace
COPY . .
ARG VERSION=0.1.0
ARG VCS_REF=unknown
LABEL org.opencontainers.image.title="superglue-sift" \
      org.opencontainers.image.description="SuperGlue on SIFT keypoints: DVC, torchrun, MLflow; CUDA 11.1" \
      org.opencontainers.image.licenses="MIT" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${VCS_REF}" \
      org.opencontainers.image.base.name="${BASE_IMAGE}" \
      superglue.stack="cu111"
# A store of its own: mlflow 3.1 cannot open a file that mlflow 3.17 has migrated.
ENV USER=pipeline \
    HOME=/home/pipeline \
    PYTHONPATH=/opt/superglue \
    PYTHONUNBUFFERED=1 \
    PYTHONWARNINGS=ignore:pkg_resources:UserWarning \
    DVC_NO_ANALYTICS=true \
    DO_NOT_TRACK=true \
    MLFLOW_DISABLE_TELEMETRY=true \
    MLFLOW_TRACKING_URI=sqlite:////workspace/mlflow-cu111.db \
    IMAGE_STACK=cu111 \
    IMAGE_REVISION="${VCS_REF}" \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000
WORKDIR /workspace
ENTRYPOINT ["tini", "--", "python", "/opt/superglue/docker/entrypoint.py"]
CMD ["repro"]
