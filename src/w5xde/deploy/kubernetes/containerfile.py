"""A Containerfile for an image with w5xde, for `podman build` or `docker build`."""

from __future__ import annotations

from w5xde.deploy.kubernetes.jobs import USER_ID

# The version that constraints.txt pins: coordinator and nodes must compute with the same one.
TORCH = "2.13.0"

CONTAINERFILE = f"""\
# An image with w5xde, for coordinator and nodes: the same bits need the same versions on both. Put the wheel
# that `make package` builds beside this file, and take the address of PyTorch's CPU wheels from its page
# "Start locally". Then
#   podman build -t registry.example/w5xde:1 --build-arg TORCH_INDEX=ADDRESS -f Containerfile .
FROM python:3.11-slim

# Alone and first, so that nothing else decides which build comes. Without TORCH_INDEX pip takes the build
# for GPUs, which is several gigabytes.
ARG TORCH_INDEX=""
RUN pip install --no-cache-dir ${{TORCH_INDEX:+--index-url "$TORCH_INDEX"}} torch=={TORCH}
COPY w5xde-*.whl /tmp/
RUN pip install --no-cache-dir /tmp/w5xde-*.whl && rm /tmp/w5xde-*.whl
# What your job imports:
# RUN pip install --no-cache-dir scikit-learn

# Not root, and by number, so that Kubernetes can tell (runAsNonRoot).
RUN useradd --uid {USER_ID} --create-home w5xde
USER {USER_ID}
ENTRYPOINT ["w5xde"]
"""
