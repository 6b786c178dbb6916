# The project, installed for CUDA machines, including its tests.
#
#   docker build --tag fctune .                                  # for docker, Slurm or a Kubernetes Job
#   docker build --target sky --tag fctune:sky .                 # for SkyPilot, which needs sudo to set up its pods
#   docker run --rm fctune .venv/bin/python -m pytest --ignore tests/layout    # needs git
#
# CUDA's libraries come with torch's wheels, the driver with the host. constraints-$TORCH.txt pins Python packages, and the
# tag of the base image the system.
FROM nvidia/cuda:12.9.1-base-ubuntu24.04 AS base

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

ARG TORCH=cuda
ARG PIP_ARGS=
COPY --chown=fctune:fctune . .
RUN make setup TORCH="$TORCH" PIP_ARGS="$PIP_ARGS"

FROM base AS sky
USER 0
# hadolint ignore=DL3008
RUN apt-get update \
  && apt-get install --yes --no-install-recommends curl openssh-server rsync sudo \
  && rm -rf /var/lib/apt/lists/* \
  && echo "fctune ALL=(ALL) NOPASSWD:ALL" > /etc/sudoers.d/fctune \
  && chmod 0440 /etc/sudoers.d/fctune
USER 1000

FROM base AS run
CMD ["fctune", "--help"]
