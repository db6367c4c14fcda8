# distcheck from this checkout, with a CPU build of torch:
#
#   docker build -t distcheck .
#   docker run --rm --user "$(id -u):$(id -g)" -v "$PWD:/work" distcheck verify --strategy my_sync.py:sync
#
# For a project with other packages, build on it: FROM distcheck, then RUN pip install what it needs.
FROM python:3.12-slim-bookworm
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /opt/distcheck
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY distcheck distcheck
COPY strategies strategies
COPY tests/mutants tests/mutants
RUN pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" .
WORKDIR /work
ENTRYPOINT ["distcheck"]
