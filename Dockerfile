# The project, installed for CUDA machines.
#
#   docker build --tag fctune .                                  # for docker, Slurm or a Kubernetes Job
#   docker build --target sky --tag fctune:sky .                 # for SkyPilot, which needs sudo to set up its pods
#   docker build --build-arg SOFTWARE=hybrid --tag fctune:hybrid .    # with fctune[hybrid], which nvcc compiles here
#   docker build --target test --tag fctune:test .               # with the tests and their tools, and run them:
#   docker run --rm fctune:test .venv/bin/python -m pytest --ignore tests/layout    # which needs the git repository
#
# CUDA's libraries come with torch's wheels, for CUDA 13.0 as in the base image, and the driver (580 or newer) with the
# host. constraints.txt pins Python packages, and the digest of the base image the system.
ARG SOFTWARE=base

FROM nvidia/cuda:13.0.3-base-ubuntu24.04@sha256:7c7413a56200486f71f181cad9310f6fd31b6bb21816ade15fc9c1e1e927a5c1 AS base

SHELL ["/bin/bash", "-euo", "pipefail", "-c"]

# torch.compile needs gcc and Python's headers at run time; NCCL loads ibverbs and rdmacm for InfiniBand. Packages are not
# pinned, because Ubuntu removes a version as soon as its successor is published.
# hadolint ignore=DL3008
RUN apt-get update \
  && apt-get install --yes --no-install-recommends \
    ca-certificates gcc git ibverbs-providers libc6-dev libibverbs1 librdmacm1t64 make python3-dev python3-venv \
  && rm -rf /var/lib/apt/lists/* \
  && userdel --remove ubuntu \
  && useradd --create-home --uid 1000 --shell /bin/bash fctune \
  && install --directory --owner fctune --group fctune /workspace

USER 1000
WORKDIR /workspace
ENV PATH=/workspace/.venv/bin:$PATH \
  PIP_NO_CACHE_DIR=1 \
  PYTHONUNBUFFERED=1

ARG PIP_ARGS=
COPY --chown=fctune:fctune Makefile README.md LICENSE pyproject.toml setup.py constraints.txt ./
COPY --chown=fctune:fctune configs configs
COPY --chown=fctune:fctune eval eval
COPY --chown=fctune:fctune fctune fctune
COPY --chown=fctune:fctune recipes recipes
COPY --chown=fctune:fctune sky sky
RUN make runtime PIP_ARGS="$PIP_ARGS"

# Wheels of the packages of fctune[hybrid] that have none on the index, for every GPU that their build scripts list.
FROM nvidia/cuda:13.0.3-devel-ubuntu24.04@sha256:b7ae301dea2c162444795462ce17a05f6a516e5a75944b57af5b88540a1a2266 AS kernels

SHELL ["/bin/bash", "-euo", "pipefail", "-c"]

# hadolint ignore=DL3008
RUN apt-get update \
  && apt-get install --yes --no-install-recommends g++ python3-dev python3-venv \
  && rm -rf /var/lib/apt/lists/* \
  && python3 -m venv /venv

# FORCE_BUILD: their build scripts would rather download a binary.
ENV CAUSAL_CONV1D_FORCE_BUILD=TRUE \
  MAMBA_FORCE_BUILD=TRUE \
  PATH=/venv/bin:$PATH \
  PIP_NO_CACHE_DIR=1

ARG MAX_JOBS=2
ARG PIP_ARGS=
WORKDIR /wheels
COPY constraints.txt .
# hadolint ignore=SC2086
RUN pip install $PIP_ARGS --constraint constraints.txt ninja packaging setuptools torch wheel \
  && MAX_JOBS=$MAX_JOBS pip wheel $PIP_ARGS --constraint constraints.txt --no-build-isolation --no-deps \
    causal-conv1d mamba-ssm

FROM base AS hybrid
# hadolint ignore=SC2086
RUN --mount=type=bind,from=kernels,source=/wheels,target=/wheels \
  pip install $PIP_ARGS --constraint constraints.txt --find-links /wheels \
    --only-binary causal-conv1d,mamba-ssm --editable '.[hybrid]'

# SkyPilot sets up its pods as their user with sudo: it installs and starts ssh, and setup.sh takes ownership of volumes.
# No other target has sudo.
# hadolint ignore=DL3006
FROM $SOFTWARE AS sky
USER 0
# hadolint ignore=DL3008
RUN apt-get update \
  && apt-get install --yes --no-install-recommends curl openssh-server rsync sudo \
  && rm -rf /var/lib/apt/lists/* \
  && echo "fctune ALL=(ALL) NOPASSWD:ALL" > /etc/sudoers.d/fctune \
  && chmod 0440 /etc/sudoers.d/fctune
USER 1000

# hadolint ignore=DL3006
FROM $SOFTWARE AS test
ARG PIP_ARGS=
COPY --chown=fctune:fctune . /workspace/
RUN make setup PIP_ARGS="$PIP_ARGS"

# hadolint ignore=DL3006
FROM $SOFTWARE AS run
CMD ["fctune", "--help"]
