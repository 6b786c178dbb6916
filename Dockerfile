# The project, set up, for CUDA machines; the tests run in it, too.
#
#   docker build --tag fctune .                                  # to run by itself, under Slurm or in a plain Job
#   docker build --target sky --tag fctune:sky .                 # for SkyPilot, which sets its pods up with sudo
#   docker run --rm fctune .venv/bin/python -m pytest --ignore tests/layout    # which asks git
#
# torch's wheels bring CUDA's libraries; the driver is the machine's. Python's versions are pinned by
# constraints-$TORCH.txt, the system's by the tag of the base.
FROM nvidia/cuda:12.9.1-base-ubuntu24.04 AS base

SHELL ["/bin/bash", "-euo", "pipefail", "-c"]

# gcc and Python's headers: torch.compile builds kernels where it runs. ibverbs, rdmacm: NCCL loads them for InfiniBand.
# Ubuntu drops a version when its successor comes, so a pinned one would not build for long.
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
